{{/* What the schema cannot say, as in workers/manifests/settled.py: everything that is wrong is told at once. */}}
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
      "config-text" "router.epp.pluginsCustomConfig" "pool-name" "the name of the release" "pool-namespace" "the namespace of the release"
      "endpoint-selector" "router.modelServers.matchLabels" "endpoint-target-ports" "router.modelServers.targetPorts"
      "endpoints" "router.modelServers.matchLabels" "metrics-endpoint-auth" "router.monitoring.prometheus.auth.enabled"
      "tracing" "router.tracing.enabled" -}}
{{- range $name, $value := $epp.flags -}}
{{- if hasKey $owned $name -}}
{{- $wrong = append $wrong (printf "router.epp.flags.%s: set %s instead" $name (get $owned $name)) -}}
{{- else if not (regexMatch "^[a-z][-a-z0-9]*$" $name) -}}
{{- $wrong = append $wrong (printf "router.epp.flags.%s: flags are written without dashes in front" $name) -}}
{{- else if and (has $name (list "workers" "workers-max" "max-endpoints" "index-entries")) (not (regexMatch "^[1-9][0-9]{0,8}$" (include "epp.text" $value))) -}}
{{- $wrong = append $wrong (printf "router.epp.flags.%s: '%v' is no count" $name $value) -}}
{{- end -}}
{{- end -}}
{{- range list "cpu" "memory" -}}
{{- if not (hasKey $epp.resources.requests .) -}}
{{- $wrong = append $wrong (printf "router.epp.resources.requests.%s: has to be set" .) -}}
{{- end -}}
{{- end -}}
{{- $preStop := include "epp.preStop" . | int -}}
{{- $drain := int $epp.drainTimeoutSeconds -}}
{{- $needed := add $preStop $drain 10 -}}
{{- if lt (int $epp.terminationGracePeriodSeconds) (int $needed) -}}
{{- $wrong = append $wrong (printf "router.epp.terminationGracePeriodSeconds: %d is less than %d: preStopSleepSeconds %d + drainTimeoutSeconds %d + 10 to end; open requests would be cut" (int $epp.terminationGracePeriodSeconds) $needed $preStop $drain) -}}
{{- end -}}
{{- if and (or (include "epp.makesPool" .) (not (include "epp.watchesPool" .))) (not $router.modelServers.matchLabels) -}}
{{- $wrong = append $wrong "router.modelServers.matchLabels: say which pods are model servers, for example app: vllm" -}}
{{- end -}}
{{- if and $router.inferenceObjectives (not (include "epp.watchesPool" .)) -}}
{{- $wrong = append $wrong "router.inferenceObjectives: without an InferencePool none are read; set router.inferencePool.create" -}}
{{- end -}}
{{- if and $epp.pluginsCustomConfig (not (hasKey $epp.pluginsCustomConfig $epp.pluginsConfigFile)) -}}
{{- $wrong = append $wrong (printf "router.epp.pluginsConfigFile: '%s' is not among router.epp.pluginsCustomConfig (%s)" $epp.pluginsConfigFile (keys $epp.pluginsCustomConfig | sortAlpha | join ", ")) -}}
{{- end -}}
{{- if include "epp.standalone" . -}}
{{- if .Values.httpRoute.create -}}
{{- $wrong = append $wrong "httpRoute.create: in standalone mode there is no gateway; remove it, or set router.mode to gateway" -}}
{{- end -}}
{{- if ne .Values.provider.name "none" -}}
{{- $wrong = append $wrong "provider.name: in standalone mode there is no gateway; remove it, or set router.mode to gateway" -}}
{{- end -}}
{{- end -}}
{{- $limit := get $epp.resources.limits "memory" -}}
{{- if and $limit (not $wrong) (not $epp.sharedMemory.sizeLimit) -}}
{{- $given := include "epp.mib" $limit -}}
{{- $shared := include "epp.sharedMemory" . | trimSuffix "Mi" | int -}}
{{- $needed := add $shared 192 (mul 16 (include "epp.workers" . | int)) -}}
{{- if and $given (lt (int $given) (int $needed)) -}}
{{- $wrong = append $wrong (printf "router.epp.resources.limits.memory: %s is less than %dMi: /dev/shm %d + 192 + 16 a worker; raise it, or have fewer workers or a smaller index" (include "epp.text" $limit) $needed $shared) -}}
{{- end -}}
{{- end -}}
{{- if $wrong -}}
{{- fail (printf "\n%s" (join "\n" $wrong)) -}}
{{- end -}}
{{- end -}}
