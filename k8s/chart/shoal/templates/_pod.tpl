{{- /* With podTemplate laid over it. */ -}}
{{- define "shoal.podTemplate" -}}
{{- if .place.podTemplate -}}
{{- mergeOverwrite (include "shoal.pod" . | fromYaml) (deepCopy .place.podTemplate) | toYaml -}}
{{- else -}}
{{- include "shoal.pod" . -}}
{{- end -}}
{{- end -}}

{{- /* The pod of head, router or replica. Takes: root, group (the Ray group, or "head"), size (gpus, cpu, memory, shm), place (values with nodeSelector and tolerations, env and the other hatches), mountsModels. */ -}}
{{- define "shoal.pod" -}}
{{- $v := .root.Values -}}
{{- $chain := include "shoal.chain" .root | fromYaml -}}
{{- $isHead := eq .group "head" -}}
{{- $claim := include "shoal.claim" .root -}}
metadata:
  labels:
    {{- include "shoal.labels" .root | nindent 4 }}
    shoal/component: ray
  {{- if or $isHead .place.annotations }}
  annotations:
    {{- if $isHead }}
    # the head has no second: a node autoscaler must not move it
    cluster-autoscaler.kubernetes.io/safe-to-evict: "false"
    karpenter.sh/do-not-disrupt: "true"
    {{- end }}
    {{- with .place.annotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
spec:
  terminationGracePeriodSeconds: {{ $chain.grace }}
  {{- if not (and $isHead $v.autoscaler.enabled) }}
  automountServiceAccountToken: false
  {{- end }}
  {{- if $v.autoscaler.enabled }}
  restartPolicy: Never # as the operator wants it with autoscaler v2
  {{- end }}
  securityContext:
    {{- include "shoal.podSecurity" .root | nindent 4 }}
  {{- with $v.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with .place.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with .place.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if or .place.tolerations .size.gpus }}
  tolerations:
    {{- if .size.gpus }}
    - {key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}
    {{- end }}
    {{- with .place.tolerations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  {{- if not $isHead }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels: {app.kubernetes.io/instance: {{ .root.Release.Name }}, ray.io/group: {{ .group }}}
  {{- end }}
  containers:
    - name: {{ ternary "ray-head" "ray-worker" $isHead }}
      image: {{ $v.image.repository }}:{{ $v.image.tag }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      securityContext:
        {{- include "shoal.containerSecurity" .root | nindent 8 }}
      env:
        {{- include "shoal.env" . | nindent 8 }}
      {{- with .place.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        {{- if $isHead }}
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
        - {name: as-metrics, containerPort: 44217}
        - {name: dash-metrics, containerPort: 44227}
        {{- end }}
        - {name: serve, containerPort: 8000} # without a port named serve the operator makes no Service
        - {name: metrics, containerPort: 8080}
      # request = limit: Ray schedules by the limit, Kubernetes evicts by the request
      resources:
        {{- $size := dict "cpu" (toString .size.cpu) "memory" (printf "%vGi" .size.memory) }}
        {{- if .size.gpus }}{{ $_ := set $size "nvidia.com/gpu" (toString .size.gpus) }}{{ end }}
        requests: {{- toYaml $size | nindent 10 }}
        limits: {{- toYaml $size | nindent 10 }}
      {{- if not $isHead }}
      # endpoints forget the pod first. Never `ray stop` here: it kills replicas before they drain
      lifecycle: {preStop: {exec: {command: [sleep, {{ $v.drain.preStopSeconds | int | toString | quote }}]}}}
      # our own: the one that the operator injects needs wget, and drops the pod after one slow second
      readinessProbe:
        exec: {command: [python, -m, cluster.k8s.probe, ready]}
        initialDelaySeconds: 5
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 3
      livenessProbe:
        exec: {command: [python, -m, cluster.k8s.probe, alive]}
        initialDelaySeconds: 60
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 12
      {{- end }}
      volumeMounts:
        - {name: shm, mountPath: /dev/shm}
        - {name: ray, mountPath: /tmp/ray}
        {{- if .mountsModels }}
        - {name: models, mountPath: /models}
        {{- end }}
        {{- if and (eq .group "router") $v.tenants.secretName }}
        - {name: tenants, mountPath: /etc/shoal/tenants, readOnly: true}
        {{- end }}
        {{- with .place.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ .size.shm }}Gi}}
    - {name: ray, emptyDir: {sizeLimit: 10Gi}}
    {{- if .mountsModels }}
    {{- if $claim }}
    - {name: models, persistentVolumeClaim: {claimName: {{ $claim }}}}
    {{- else }}
    - {name: models, emptyDir: {}}
    {{- end }}
    {{- end }}
    {{- if and (eq .group "router") $v.tenants.secretName }}
    # 0440, which YAML 1.1 and 1.2 read differently
    - {name: tenants, secret: {secretName: {{ $v.tenants.secretName }}, defaultMode: 288}}
    {{- end }}
    {{- with .place.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "shoal.env" -}}
{{- $v := .root.Values -}}
{{- $chain := include "shoal.chain" .root | fromYaml -}}
- {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: {{ $chain.ray | toString | quote }}}
# as `shoal serve` sets them (cluster/serve_env.py): less CPU per streamed token, who is frozen is not waited for, a guarded proxy
- {name: RAY_SERVE_PROXY_USE_GRPC, value: "1"}
- {name: RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD, value: "0"}
- {name: RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP, value: "0"}
- {name: RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS, value: "1"}
- {name: RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S, value: "1"}
- {name: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, value: router.proxy_guard.middlewares}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
# how long a worker lives without the head
- {name: RAY_gcs_rpc_server_reconnect_timeout_s, value: {{ ternary "60" "600" (eq .group "head") | quote }}}
{{- if eq .group "head" }}
# a new head's controller kills who has not answered after so long, with its streams; by default after 30 s
- {name: RAY_SERVE_SLOW_STARTUP_WARNING_S, value: "300"}
{{- end }}
{{- if .mountsModels }}
- {name: HF_HOME, value: /models/hf}
{{- if or (include "shoal.claim" .root) (contains "/" $v.model.id) }}
# the image holds the default model in a folder of its own
- {name: SHOAL_CACHE, value: /models/shoal}
{{- end }}
{{- if $v.hfToken.secretName }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ $v.hfToken.secretName }}, key: {{ $v.hfToken.key }}, optional: true}}
{{- end }}
{{- end }}
{{- with $v.clusterToken.secretName }}
- name: SHOAL_CLUSTER_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $v.clusterToken.key }}}}
{{- end }}
{{- range $name, $value := .place.env }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end -}}
