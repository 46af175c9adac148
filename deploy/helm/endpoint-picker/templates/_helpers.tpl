{{/* Derived values. files/sizes.json has the constants that `epp size` uses; both compute the same size of /dev/shm. */}}

{{- define "epp.name" -}}
{{ .Release.Name }}-epp
{{- end -}}

{{- define "epp.clusterName" -}}
{{ .Release.Name }}-{{ .Release.Namespace }}-epp
{{- end -}}

{{- define "epp.selector" -}}
app.kubernetes.io/name: endpoint-picker
app.kubernetes.io/instance: {{ include "epp.name" . }}
{{- end -}}

{{- define "epp.labels" -}}
{{ include "epp.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end -}}

{{/* Labels of pods: also the one that selectors for pods of the reference's chart use. */}}
{{- define "epp.podLabels" -}}
{{ include "epp.labels" . }}
llm-d-router-{{ if include "epp.watchesPool" . }}gateway{{ else }}standalone{{ end }}: {{ include "epp.name" . }}
{{- end -}}

{{/* A constant of files/sizes.json. The argument is a list of the root and the name. */}}
{{- define "epp.size" -}}
{{- get ((index . 0).Files.Get "files/sizes.json" | fromJson) (index . 1) | int64 -}}
{{- end -}}

{{/* Defaults with given fields in place of theirs. The argument is a list of the defaults as YAML text and the given mapping. */}}
{{- define "epp.replaced" -}}
{{- $result := index . 0 | fromYaml -}}
{{- range $name, $value := index . 1 }}{{ $_ := set $result $name $value }}{{ end -}}
{{- toYaml $result -}}
{{- end -}}

{{/* Metadata of a namespaced object. The argument is a list of the root and the name. */}}
{{- define "epp.metadata" -}}
{{- $root := index . 0 -}}
name: {{ index . 1 }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "epp.labels" $root | nindent 2 }}
{{- end -}}

{{/* A true boolean is "true", a false one is empty. */}}
{{- define "epp.standalone" -}}
{{- if eq .Values.router.mode "standalone" }}true{{ end -}}
{{- end -}}

{{- define "epp.makesPool" -}}
{{- $create := .Values.router.inferencePool.create -}}
{{- if kindIs "invalid" $create -}}
{{- if not (include "epp.standalone" .) }}true{{ end -}}
{{- else if $create }}true{{ end -}}
{{- end -}}

{{- define "epp.watchesPool" -}}
{{- if or (not (include "epp.standalone" .)) (include "epp.makesPool" .) }}true{{ end -}}
{{- end -}}

{{- define "epp.elects" -}}
{{- $flags := .Values.router.epp.flags -}}
{{- if hasKey $flags "ha-enable-leader-election" -}}
{{- if eq (toString (index $flags "ha-enable-leader-election")) "true" }}true{{ end -}}
{{- else if and (gt (int .Values.router.epp.replicas) 1) (not .Values.router.pools.ports) (not .Values.router.epp.replicaStore.url) }}true{{ end -}}
{{- end -}}

{{/* The URL of the replica store, with the mounted files of its TLS. */}}
{{- define "epp.storeUrl" -}}
{{- $store := .Values.router.epp.replicaStore -}}
{{- $options := list -}}
{{- if or $store.tls.existingSecret $store.tls.clientCertificate -}}
{{- if hasPrefix "redis+sentinel://" $store.url }}{{ $options = append $options "tls=true" }}{{ end -}}
{{- $options = append $options "ca=/replica-store-tls/ca.crt" -}}
{{- if $store.tls.clientCertificate }}{{ $options = concat $options (list "cert=/replica-store-tls/tls.crt" "key=/replica-store-tls/tls.key") }}{{ end -}}
{{- end -}}
{{- $store.url -}}
{{- with $options }}{{ ternary "&" "?" (contains "?" $store.url) }}{{ join "&" . }}{{ end -}}
{{- end -}}

{{/* The ports of the hosts in the URL of the replica store. Behind Sentinel also 6379, on which the store itself usually listens. */}}
{{- define "epp.storePorts" -}}
{{- $url := .Values.router.epp.replicaStore.url -}}
{{- $sentinel := hasPrefix "redis+sentinel://" $url -}}
{{- $ports := list -}}
{{- range splitList "," (regexReplaceAll "^[^/]*//([^/?]*).*$" $url "${1}") -}}
{{- $ports = append $ports (regexFind ":[0-9]+$" . | trimPrefix ":" | default (ternary "26379" "6379" $sentinel) | int) -}}
{{- end -}}
{{- if $sentinel }}{{ $ports = append $ports 6379 }}{{ end -}}
{{- $ports | uniq | toJson -}}
{{- end -}}

{{- define "epp.secure" -}}
{{- $flags := .Values.router.epp.flags -}}
{{- if hasKey $flags "secure-serving" -}}
{{- if eq (toString (index $flags "secure-serving")) "true" }}true{{ end -}}
{{- else if not (include "epp.standalone" .) }}true{{ end -}}
{{- end -}}

{{- define "epp.followsKvEvents" -}}
{{- if or .Values.router.kvEvents.serverPorts .Values.router.kvEvents.bindPort }}true{{ end -}}
{{- end -}}

{{- define "epp.authenticates" -}}
{{- if .Values.router.monitoring.prometheus.auth.enabled }}true{{ end -}}
{{- end -}}

{{- define "epp.image" -}}
{{- $image := .Values.router.epp.image -}}
{{- with $image.registry }}{{ . }}/{{ end }}{{ $image.repository }}:{{ $image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "epp.preStop" -}}
{{- $seconds := .Values.router.epp.preStopSleepSeconds -}}
{{- if not (kindIs "invalid" $seconds) }}{{ int $seconds }}{{ else if include "epp.elects" . }}0{{ else }}10{{ end -}}
{{- end -}}

{{/* A CPU quantity, rounded up. The checks refuse other forms. */}}
{{- define "epp.cpus" -}}
{{- $cpu := toString . -}}
{{- if hasSuffix "m" $cpu -}}
{{- max 1 (ceil (divf (trimSuffix "m" $cpu | float64) 1000.0)) -}}
{{- else -}}
{{- max 1 (ceil (float64 $cpu)) -}}
{{- end -}}
{{- end -}}

{{- define "epp.workers" -}}
{{- $flags := .Values.router.epp.flags -}}
{{- if hasKey $flags "workers" }}{{ int $flags.workers }}{{ else }}{{ include "epp.cpus" .Values.router.epp.resources.requests.cpu }}{{ end -}}
{{- end -}}

{{/* Size of /dev/shm: a quarter more than index entries, held blocks with KV events, endpoints and possible workers need, plus a fixed part, in whole steps. */}}
{{- define "epp.sharedMemory" -}}
{{- $given := .Values.router.epp.sharedMemory.sizeLimit -}}
{{- if $given }}{{ $given }}{{ else -}}
{{- $flags := .Values.router.epp.flags -}}
{{- $most := get $flags "workers-max" | default (mul 2 (include "epp.workers" . | int)) | int -}}
{{- $sizes := .Files.Get "files/sizes.json" | fromJson -}}
{{- $places := get $flags "max-endpoints" | default $sizes.maxEndpoints | int64 -}}
{{- $pools := len .Values.router.pools.ports -}}
{{- if $pools }}{{ $places = mul $pools (get $flags "max-endpoints" | default 64 | int64) }}{{ end -}}
{{- $entries := get $flags "index-entries" | default $sizes.indexEntries | int64 -}}
{{- $kib := add (div (mul $entries (int64 $sizes.entryBytes)) 1024) (mul $places (int64 $sizes.endpointKib)) (mul $most (int64 $sizes.workerKib)) -}}
{{- $held := get $flags "kv-index-blocks" | default (ternary $sizes.kvIndexBlocks 0 (eq (include "epp.followsKvEvents" .) "true")) | int64 -}}
{{- $kib = add $kib (div (mul $held (int64 $sizes.heldBlockBytes)) 1024) -}}
{{- $kib = add $kib (mul $pools 512) -}}
{{- $needed := add (div (mul $kib 5) 4) (int64 $sizes.fixedKib) -}}
{{- $step := int64 $sizes.stepKib -}}
{{- mul (div (add $needed (sub $step 1)) $step) (div $step 1024) -}}Mi
{{- end -}}
{{- end -}}

{{/* A memory quantity in MiB, or empty for unusual forms. */}}
{{- define "epp.mib" -}}
{{- $quantity := include "epp.text" . -}}
{{- if regexMatch "^[0-9]+(\\.[0-9]+)?(k|M|G|T|Ki|Mi|Gi|Ti)?$" $quantity -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $number := regexFind "^[0-9.]+" $quantity -}}
{{- div (mulf (float64 $number) (get $units (trimPrefix $number $quantity)) | int64) 1048576 -}}
{{- end -}}
{{- end -}}

{{- define "epp.parsers" -}}
{{- $servers := .Values.router.modelServers -}}
{{- $names := .Values.router.epp.parsers -}}
{{- if not $names -}}
{{- if eq $servers.type "triton" }}{{ $names = list "passthrough-parser" }}
{{- else if and (eq $servers.type "vllm") (eq $servers.protocol "grpc") }}{{ $names = list "vllmgrpc-parser" }}{{ end -}}
{{- end -}}
{{- $parsers := list -}}
{{- range $names }}{{ $parsers = append $parsers (dict "pluginRef" .) }}{{ end -}}
{{- toJson $parsers -}}
{{- end -}}

{{/* The files of the picker's ConfigMap, as a mapping. */}}
{{- define "epp.plugins" -}}
{{- $epp := .Values.router.epp -}}
{{- if $epp.pluginsCustomConfig -}}
{{- toYaml $epp.pluginsCustomConfig -}}
{{- else -}}
{{- $source := $epp.metricsDataSource -}}
{{- $text := .Files.Get "files/default-plugins.yaml"
      | replace "@SCHEME@" (toJson $source.scheme)
      | replace "@PATH@" (toJson $source.path)
      | replace "@INSECURE@" (toJson $source.insecureSkipVerify)
      | replace "@ENGINE@" (toJson .Values.router.modelServers.type)
      | replace "@PARSERS@" (include "epp.parsers" .) -}}
{{- toYaml (dict $epp.pluginsConfigFile $text) -}}
{{- end -}}
{{- end -}}

{{- define "epp.envoy" -}}
{{- $router := .Values.router -}}
{{- $types := "type.googleapis.com/envoy.extensions.transport_sockets." -}}
{{- $socket := dict "name" "plain" "typed_config" (dict "@type" (printf "%sraw_buffer.v3.RawBuffer" $types)) -}}
{{- if include "epp.secure" . -}}
{{- $context := dict "@type" (printf "%stls.v3.UpstreamTlsContext" $types) "common_tls_context" (dict "alpn_protocols" (list "h2")) -}}
{{- $socket = dict "name" "tls" "typed_config" $context -}}
{{- end -}}
{{- $http := ternary "http2_protocol_options" "http_protocol_options" (eq $router.modelServers.protocol "grpc") -}}
{{- .Files.Get "files/envoy.yaml"
      | replace "@PORT@" (toJson $router.proxy.port)
      | replace "@METRICS_PORT@" (toJson $router.proxy.metricsPort)
      | replace "@PICKER_PORT@" (toJson $router.epp.extProcPort)
      | replace "@TRANSPORT_SOCKET@" (toJson $socket)
      | replace "@SERVERS_HTTP@" (toJson $http) -}}
{{- end -}}

{{/* Changes with Envoy's file, so that a changed file replaces the pods. The picker reloads its own file (--config-watch). */}}
{{- define "epp.checksum" -}}
{{- if include "epp.standalone" . }}{{ include "epp.envoy" . | sha256sum }}{{ else }}none{{ end -}}
{{- end -}}

{{/* The text of a flag's value. helm parses whole numbers in a file as floats. */}}
{{- define "epp.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ toString . }}{{ end -}}
{{- end -}}

{{- define "epp.argument" -}}
{{- printf "%s%s=%s" (ternary "-" "--" (eq (len (index . 0)) 1)) (index . 0) (include "epp.text" (index . 1)) -}}
{{- end -}}

{{- define "epp.lease" -}}
epp-{{ .Release.Namespace }}-{{ if include "epp.watchesPool" . }}{{ .Release.Name }}{{ else }}{{ include "epp.name" . }}{{ end }}.llm-d.ai
{{- end -}}

{{- define "epp.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* The render sidecar. Its root file system is read-only, so its home is the volume of the tokenizer's cache. */}}
{{- define "epp.tokenizer" -}}
{{- $tokenizer := .Values.router.tokenizer -}}
{{- $image := $tokenizer.image -}}
{{- $named := dict -}}
{{- range $tokenizer.env }}{{ $_ := set $named .name true }}{{ end -}}
{{- $args := $tokenizer.args | default (list $tokenizer.modelName (printf "--port=%d" (int $tokenizer.port))) -}}
- name: vllm-render
  image: {{ with $image.registry }}{{ . }}/{{ end }}{{ $image.repository }}:{{ $image.tag }}
  imagePullPolicy: {{ $image.pullPolicy }}
  restartPolicy: Always # a native sidecar: it renders until the picker has ended
  command:
    {{- toYaml ($tokenizer.command | default (list "vllm" "launch" "render")) | nindent 4 }}
  args:
    {{- toYaml (concat $args $tokenizer.extraArgs) | nindent 4 }}
  env:
  {{- if not (hasKey $named "HOME") }}
  - name: HOME
    value: /model-cache
  {{- end }}
  {{- with $tokenizer.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  ports:
  - name: render-http
    containerPort: {{ $tokenizer.port }}
  {{- with $tokenizer.readinessProbe }}
  readinessProbe:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  resources:
    {{- toYaml $tokenizer.resources | nindent 4 }}
  securityContext:
    {{- include "epp.containerSecurity" . | nindent 4 }}
  volumeMounts:
  - name: model-cache
    mountPath: /model-cache
  - name: render-tmp
    mountPath: /tmp
  {{- with $tokenizer.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "epp.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* With leader election only the leader is ready. New pods start and old pods stop at the same time, and the leader releases its lease. */}}
{{- define "epp.strategy" -}}
{{- if .Values.router.epp.deploymentStrategy -}}
{{- toYaml .Values.router.epp.deploymentStrategy -}}
{{- else -}}
{{- $election := dict "maxSurge" "100%" "maxUnavailable" "100%" -}}
{{- $rolling := ternary $election (dict "maxSurge" 1 "maxUnavailable" 0) (eq (include "epp.elects" .) "true") -}}
{{- dict "type" "RollingUpdate" "rollingUpdate" $rolling | toYaml -}}
{{- end -}}
{{- end -}}

{{/* A rule of a NetworkPolicy. The argument is a list: "from" or "to", peers, ports. */}}
{{- define "epp.allowed" -}}
- ports:
  {{- range index . 2 }}
  - {protocol: TCP, port: {{ . }}}
  {{- end }}
  {{- with index . 1 }}
  {{ index $ 0 }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
