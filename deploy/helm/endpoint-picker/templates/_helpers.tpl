{{/* What follows from values, as in workers/manifests/settled.py; a test holds both to the same results. */}}

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

{{/* Metadata of a namespaced object: list of the root and its name. */}}
{{- define "epp.metadata" -}}
{{- $root := index . 0 -}}
name: {{ index . 1 }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "epp.labels" $root | nindent 2 }}
{{- end -}}

{{/* Booleans are "true" or empty. */}}
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
{{- else if gt (int .Values.router.epp.replicas) 1 }}true{{ end -}}
{{- end -}}

{{- define "epp.secure" -}}
{{- $flags := .Values.router.epp.flags -}}
{{- if hasKey $flags "secure-serving" -}}
{{- if eq (toString (index $flags "secure-serving")) "true" }}true{{ end -}}
{{- else if not (include "epp.standalone" .) }}true{{ end -}}
{{- end -}}

{{- define "epp.authenticates" -}}
{{- if .Values.router.monitoring.prometheus.auth.enabled }}true{{ end -}}
{{- end -}}

{{- define "epp.image" -}}
{{- $image := .Values.router.epp.image -}}
{{- with $image.registry }}{{ . }}/{{ end }}{{ $image.repository }}:{{ $image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "epp.preStop" -}}
{{- $asked := .Values.router.epp.preStopSleepSeconds -}}
{{- if not (kindIs "invalid" $asked) }}{{ int $asked }}{{ else if include "epp.elects" . }}0{{ else }}10{{ end -}}
{{- end -}}

{{/* A CPU quantity, rounded up. */}}
{{- define "epp.cpus" -}}
{{- $cpu := toString . -}}
{{- if not (regexMatch "^([0-9]+m|[0-9]*\\.?[0-9]+)$" $cpu) -}}
{{- fail (printf "router.epp.resources.requests.cpu: '%s' is no quantity of CPUs; write 2, 0.5 or 500m" $cpu) -}}
{{- end -}}
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

{{/* Of /dev/shm: 5/4 of 12 B an index entry, 5 KiB a place, 3,600 KiB a worker that there can be, and 4 MiB; in whole 16 MiB. */}}
{{- define "epp.sharedMemory" -}}
{{- $given := .Values.router.epp.sharedMemory.sizeLimit -}}
{{- if $given }}{{ $given }}{{ else -}}
{{- $flags := .Values.router.epp.flags -}}
{{- $most := get $flags "workers-max" | default (mul 2 (include "epp.workers" . | int)) | int -}}
{{- $places := get $flags "max-endpoints" | default 1024 | int -}}
{{- $entries := get $flags "index-entries" | default 524288 | int -}}
{{- $kib := add (div (mul $entries 12) 1024) (mul $places 5) (mul $most 3600) -}}
{{- $needed := add (div (mul $kib 5) 4) 4096 -}}
{{- mul (div (add $needed 16383) 16384) 16 -}}Mi
{{- end -}}
{{- end -}}

{{/* Of a memory quantity in one of the usual forms, in MiB; empty for others. */}}
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

{{/* Files of the picker's ConfigMap: a mapping. */}}
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

{{/* Changes with the files, so that pods are replaced. */}}
{{- define "epp.checksum" -}}
{{- $told := "" -}}
{{- range $name, $content := printf "%s\n" (include "epp.plugins" .) | fromYaml }}{{ $told = printf "%s%s\n%s\n" $told $name $content }}{{ end -}}
{{- if include "epp.standalone" . }}{{ $told = printf "%s%s" $told (include "epp.envoy" .) }}{{ end -}}
{{- $told | sha256sum -}}
{{- end -}}

{{/* Of a flag; helm reads whole numbers of a file as fractions. */}}
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

{{/* A rule of a NetworkPolicy: list of from or to, peers, ports. */}}
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
