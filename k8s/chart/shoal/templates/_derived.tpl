{{- /* What follows from the values, each in one place. */ -}}

{{- define "shoal.labels" -}}
app.kubernetes.io/name: shoal
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- /* What selects the pods of Ray. The operator's own labels tell the cluster, whose name changes at each upgrade, and not the release. */ -}}
{{- define "shoal.selector" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
shoal/component: ray
{{- end -}}

{{- define "shoal.metadataLabels" -}}
{{ include "shoal.labels" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- /*
The chain of who waits for whom, each longer than what it waits for, or running streams are cut:
  serve    Serve's graceful_shutdown_timeout_s: drain_s + 10 of replicas, longest_stream_s of routers (set by the application)
  ray      RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, from SIGTERM on; Ray's default of 30 s loses the race
  grace    terminationGracePeriodSeconds, preStop included; then SIGKILL
  deletion rayClusterDeletionDelaySeconds: the old cluster of an upgrade; its default of 60 s cuts streams
All are upper limits: an idle pod is gone in seconds.
*/ -}}
{{- define "shoal.chain" -}}
{{- $serve := max (add (int .Values.drain.seconds) 10) (int .Values.drain.longestStreamSeconds) -}}
{{- $ray := add $serve 20 -}}
ray: {{ $ray }}
grace: {{ add $ray (int .Values.drain.preStopSeconds) 25 }}
deletion: {{ max 600 (add $serve 60) }}
{{- end -}}

{{- /* GPUs, CPUs, GiB of memory and of /dev/shm of a pod with replicas. */ -}}
{{- define "shoal.size" -}}
{{- $p := .Values.pods -}}
{{- $gpus := 0 -}}
{{- if eq .Values.device "gpu" -}}
{{- $gpus = int (mul (div (int .Values.tensorParallel) (int $p.hostsPerReplica)) (int $p.replicasPerPod)) -}}
{{- end -}}
{{- $cpu := int ($p.cpu | default (ternary (mul 8 $gpus) (mul 4 (int $p.replicasPerPod)) (gt $gpus 0))) -}}
{{- $memory := int ($p.memoryGiB | default (ternary (mul 64 $gpus) (mul 12 (int $p.replicasPerPod)) (gt $gpus 0))) -}}
gpus: {{ $gpus }}
cpu: {{ $cpu }}
memory: {{ $memory }}
shm: {{ $p.shmGiB | default (max 2 (div $memory 4)) | int }}
{{- end -}}

{{- /* The groups of pods, in an order that stays: routers, then the roles of replicas. `most` is for the autoscaler. */ -}}
{{- define "shoal.groups" -}}
{{- $p := .Values.pods -}}
{{- $scaler := .Values.autoscaler -}}
{{- $roles := list (dict "name" "both" "replicas" (int .Values.replicas)) -}}
{{- if .Values.disaggregation.enabled -}}
{{- $roles = list (dict "name" "prefill" "replicas" (int .Values.disaggregation.prefill.replicas)) (dict "name" "decode" "replicas" (int .Values.disaggregation.decode.replicas)) -}}
{{- end -}}
groups:
  - {name: router, pods: {{ int .Values.router.replicas }}, most: {{ int .Values.router.replicas }}, hosts: 1}
{{- range $roles }}
{{- $most := .replicas }}
{{- if $scaler.enabled }}{{ $most = int ($scaler.maxReplicas | default (mul 2 .replicas)) }}{{ end }}
{{- $pods := div (add .replicas (sub (int $p.replicasPerPod) 1)) (int $p.replicasPerPod) }}
  - {name: {{ .name }}, pods: {{ $pods }}, most: {{ div (add $most (sub (int $p.replicasPerPod) 1)) (int $p.replicasPerPod) }}, hosts: {{ int $p.hostsPerReplica }}}
{{- end }}
{{- end -}}

{{- define "shoal.redisAddress" -}}
{{- .Values.headState.address | default (printf "%s-redis:6379" .Release.Name) -}}
{{- end -}}

{{- define "shoal.claim" -}}
{{- if .Values.cache.existingClaim -}}{{ .Values.cache.existingClaim }}{{- else if .Values.cache.size -}}{{ .Release.Name }}-models{{- end -}}
{{- end -}}

{{- define "shoal.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
# not each file of a full model cache again at every start
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "shoal.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end -}}
