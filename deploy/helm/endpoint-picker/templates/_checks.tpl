{{/* Checks that the schema cannot express. All errors are reported at once; `epp manifests` shows them, too. */}}
{{- define "epp.checks" -}}
{{- $router := .Values.router -}}
{{- $epp := $router.epp -}}
{{- $wrong := list -}}
{{- range $what, $name := dict "pool name" .Release.Name "namespace" .Release.Namespace -}}
{{- if or (gt (len $name) 40) (not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name)) -}}
{{- $wrong = append $wrong (printf "%s '%s': at most 40 lower-case letters, digits and dashes, beginning with a letter" $what $name) -}}
{{- end -}}
{{- end -}}
{{- $owned := dict
      "grpc-port" "router.epp.extProcPort" "grpc-health-port" "router.epp.grpcHealthPort" "metrics-port" "router.metricsPort"
      "drain-timeout" "router.epp.drainTimeoutSeconds" "config-file" "router.epp.pluginsConfigFile"
      "config-dir" "router.epp.pluginsCustomConfig" "service-name" "router.pools.ports" "pool-ports" "router.pools.ports"
      "config-text" "router.epp.pluginsCustomConfig" "pool-name" "the name of the release" "pool-namespace" "the namespace of the release"
      "endpoint-selector" "router.modelServers.matchLabels" "endpoint-target-ports" "router.modelServers.targetPorts"
      "endpoints" "router.modelServers.matchLabels" "metrics-endpoint-auth" "router.monitoring.prometheus.auth.enabled"
      "tracing" "router.tracing.enabled" "replica-store" "router.epp.replicaStore.url"
      "replica-store-password-file" "router.epp.replicaStore.existingSecret" -}}
{{- range $name, $value := $epp.flags -}}
{{- if hasKey $owned $name -}}
{{- $wrong = append $wrong (printf "router.epp.flags.%s: set %s instead" $name (get $owned $name)) -}}
{{- else if not (regexMatch "^[a-z][-a-z0-9]*$" $name) -}}
{{- $wrong = append $wrong (printf "router.epp.flags.%s: flags are written without dashes in front" $name) -}}
{{- else if and (has $name (list "workers" "workers-max" "max-endpoints" "index-entries")) (not (regexMatch "^[1-9][0-9]{0,8}$" (include "epp.text" $value))) -}}
{{- $wrong = append $wrong (printf "router.epp.flags.%s: '%s' is no count" $name (include "epp.text" $value)) -}}
{{- end -}}
{{- end -}}
{{- $store := $epp.replicaStore -}}
{{- $tls := or $store.tls.existingSecret $store.tls.clientCertificate -}}
{{- if regexMatch "^[^/]*//[^/@]*:[^/@]*@" $store.url -}}
{{- $wrong = append $wrong "router.epp.replicaStore.url: it has a password, which everybody who may read the Deployment would see; put it into a Secret, under the key password, and name that in router.epp.replicaStore.existingSecret" -}}
{{- end -}}
{{- if and (not $store.url) (or $store.existingSecret $tls) -}}
{{- $wrong = append $wrong "router.epp.replicaStore.url: without it, existingSecret and tls have no effect; give it, or remove them" -}}
{{- else if and $tls (not (regexMatch "^(rediss|redis\\+sentinel)://" $store.url)) -}}
{{- $wrong = append $wrong "router.epp.replicaStore.tls: only rediss:// and redis+sentinel:// have TLS; change the URL, or remove tls" -}}
{{- else if and $store.tls.clientCertificate (not $store.tls.existingSecret) -}}
{{- $wrong = append $wrong "router.epp.replicaStore.tls.existingSecret: name the Secret with tls.crt and tls.key, or remove clientCertificate" -}}
{{- end -}}
{{- $most := get $epp.flags "replicas-max" | default 8 | int -}}
{{- if and $store.url (gt (int $epp.replicas) (add1 $most | int)) -}}
{{- $wrong = append $wrong (printf "router.epp.replicas: %d replicas, but each counts only %d others; set router.epp.flags.replicas-max to %d" (int $epp.replicas) $most (sub (int $epp.replicas) 1)) -}}
{{- end -}}
{{- range list "cpu" "memory" -}}
{{- if not (hasKey $epp.resources.requests .) -}}
{{- $wrong = append $wrong (printf "router.epp.resources.requests.%s: has to be set" .) -}}
{{- end -}}
{{- end -}}
{{- $cpu := toString (get $epp.resources.requests "cpu" | default "1") -}}
{{- $threads := toString (get $router.proxy.resources.requests "cpu" | default "1") -}}
{{- range $path, $quantity := dict "router.epp" $cpu "router.proxy" $threads -}}
{{- if not (regexMatch "^([0-9]+m|[0-9]*\\.?[0-9]+)$" $quantity) -}}
{{- $wrong = append $wrong (printf "%s.resources.requests.cpu: '%s' is no quantity of CPUs; write 2, 0.5 or 500m" $path $quantity) -}}
{{- end -}}
{{- end -}}
{{- $preStop := include "epp.preStop" . | int -}}
{{- $drain := int $epp.drainTimeoutSeconds -}}
{{- $needed := add $preStop $drain (include "epp.size" (list . "endSeconds") | int) -}}
{{- if lt (int $epp.terminationGracePeriodSeconds) (int $needed) -}}
{{- $wrong = append $wrong (printf "router.epp.terminationGracePeriodSeconds: %d is less than %d: preStopSleepSeconds %d + drainTimeoutSeconds %d + %s to end; open requests would be cut" (int $epp.terminationGracePeriodSeconds) $needed $preStop $drain (include "epp.size" (list . "endSeconds"))) -}}
{{- end -}}
{{- if and (not $router.pools.ports) (or (include "epp.makesPool" .) (not (include "epp.watchesPool" .))) (not $router.modelServers.matchLabels) -}}
{{- $wrong = append $wrong "router.modelServers.matchLabels: say which pods are model servers, for example app: vllm (epp manifests: --selector app=vllm)" -}}
{{- end -}}
{{- if and $router.inferenceObjectives (not (include "epp.watchesPool" .)) -}}
{{- $wrong = append $wrong "router.inferenceObjectives: without an InferencePool none are read; set router.inferencePool.create" -}}
{{- end -}}
{{- $ports := list -}}
{{- range $router.pools.ports }}{{ $ports = append $ports (int .) }}{{ end -}}
{{- if and $ports (include "epp.standalone" .) -}}
{{- $wrong = append $wrong "router.pools.ports: in standalone mode there is one pool; remove them, or set router.mode to gateway" -}}
{{- end -}}
{{- if and $ports (eq (include "epp.elects" .) "true") -}}
{{- $wrong = append $wrong "router.pools.ports: several pools have no leader election; remove router.epp.flags.ha-enable-leader-election, and set router.epp.replicaStore for replicas that act as one" -}}
{{- end -}}
{{- if and $ports .Values.httpRoute.create -}}
{{- $wrong = append $wrong "httpRoute.create: a route leads to the pool of the release, which router.pools replaces; create a route to each pool" -}}
{{- end -}}
{{- if and $ports $router.inferenceObjectives -}}
{{- $wrong = append $wrong "router.inferenceObjectives: they belong to the pool of the release, which router.pools replaces; create them with a poolRef" -}}
{{- end -}}
{{- range $port := list (int $epp.grpcHealthPort) (int $router.metricsPort) -}}
{{- if has $port $ports -}}
{{- $wrong = append $wrong (printf "router.pools.ports: %d is a port of the picker; give the pool another one" $port) -}}
{{- end -}}
{{- end -}}
{{- $of := dict -}}
{{- range $router.pools.create -}}
{{- $port := toString .port -}}
{{- if not (has (int .port) $ports) -}}
{{- $wrong = append $wrong (printf "router.pools.create: pool %s has port %s, which router.pools.ports does not have" .name $port) -}}
{{- else if hasKey $of $port -}}
{{- $wrong = append $wrong (printf "router.pools.create: pools %s and %s both have port %s" (get $of $port) .name $port) -}}
{{- end -}}
{{- $_ := set $of $port .name -}}
{{- end -}}
{{- if and $epp.pluginsCustomConfig (not (hasKey $epp.pluginsCustomConfig $epp.pluginsConfigFile)) -}}
{{- $wrong = append $wrong (printf "router.epp.pluginsConfigFile: '%s' is not among router.epp.pluginsCustomConfig (%s)" $epp.pluginsConfigFile (keys $epp.pluginsCustomConfig | sortAlpha | join ", ")) -}}
{{- end -}}
{{- if and (kindIs "bool" $router.proxy.enabled) (ne (include "epp.standalone" .) (ternary "true" "" $router.proxy.enabled)) -}}
{{- $wrong = append $wrong (printf "router.proxy.enabled: router.mode %s has %s; remove it, or set router.mode" $router.mode (ternary "no proxy" "a proxy" $router.proxy.enabled)) -}}
{{- end -}}
{{- if include "epp.standalone" . -}}
{{- if .Values.httpRoute.create -}}
{{- $wrong = append $wrong "httpRoute.create: in standalone mode there is no gateway; remove it, or set router.mode to gateway" -}}
{{- end -}}
{{- if ne .Values.provider.name "none" -}}
{{- $wrong = append $wrong "provider.name: in standalone mode there is no gateway; remove it, or set router.mode to gateway" -}}
{{- end -}}
{{- end -}}
{{- $tokenizer := $router.tokenizer -}}
{{- if and $tokenizer.enabled (not $tokenizer.modelName) (not $tokenizer.args) -}}
{{- $wrong = append $wrong "router.tokenizer.modelName: name the model that the servers serve, for example Qwen/Qwen3-32B" -}}
{{- end -}}
{{- $listened := list (list "router.epp.extProcPort" $epp.extProcPort) (list "router.epp.grpcHealthPort" $epp.grpcHealthPort) (list "router.metricsPort" $router.metricsPort) -}}
{{- if include "epp.standalone" . -}}
{{- $listened = concat $listened (list (list "router.proxy.port" $router.proxy.port) (list "router.proxy.metricsPort" $router.proxy.metricsPort)) -}}
{{- end -}}
{{- $added := list -}}
{{- if $tokenizer.enabled }}{{ $added = append $added (list "router.tokenizer.port" $tokenizer.port) }}{{ end -}}
{{- if $router.kvEvents.bindPort }}{{ $added = append $added (list "router.kvEvents.bindPort" $router.kvEvents.bindPort) }}{{ end -}}
{{- range $one := $added -}}
{{- range $other := $listened -}}
{{- if eq (int (index $one 1)) (int (index $other 1)) -}}
{{- $wrong = append $wrong (printf "%s: %d is also %s; all containers of a pod share its ports, so give it another one" (index $one 0) (int (index $one 1)) (index $other 0)) -}}
{{- end -}}
{{- end -}}
{{- $listened = append $listened $one -}}
{{- end -}}
{{- $limit := get $epp.resources.limits "memory" -}}
{{- if and $limit (not $wrong) (not $epp.sharedMemory.sizeLimit) -}}
{{- $given := include "epp.mib" $limit -}}
{{- $shared := include "epp.sharedMemory" . | trimSuffix "Mi" | int -}}
{{- $processes := include "epp.size" (list . "processesMib") | int -}}
{{- $worker := include "epp.size" (list . "workerMib") | int -}}
{{- $needed := add $shared $processes (mul $worker (include "epp.workers" . | int)) -}}
{{- if and $given (lt (int $given) (int $needed)) -}}
{{- $wrong = append $wrong (printf "router.epp.resources.limits.memory: %s is less than %dMi: /dev/shm %d + %d + %d a worker; raise it, or have fewer workers or a smaller index" (include "epp.text" $limit) $needed $shared $processes $worker) -}}
{{- end -}}
{{- end -}}
{{- if $wrong -}}
{{- fail (printf "\n%s" (join "\n" $wrong)) -}}
{{- end -}}
{{- end -}}
