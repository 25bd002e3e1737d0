{{- /* serveConfigV2. cluster/k8s/serve_config.py says the same for `shoal k8s render`; a test holds the two together. */ -}}
{{- define "shoal.args" -}}
{{- $v := .Values -}}
{{- $tp := int $v.tensorParallel -}}
{{- $args := dict "model" $v.model.id "tensor_parallel_size" $tp "node_label" "shoal/role"
  "drain_s" (int $v.drain.seconds) "longest_stream_s" (int $v.drain.longestStreamSeconds)
  "router" (dict "replicas" (int $v.router.replicas)) -}}
{{- if $v.disaggregation.enabled -}}
{{- $_ := set $args "replicas" (dict "prefill" (int $v.disaggregation.prefill.replicas) "decode" (int $v.disaggregation.decode.replicas)) -}}
{{- else -}}
{{- $_ := set $args "replicas" (dict "both" (int $v.replicas)) -}}
{{- end -}}
{{- if and $v.autoscaler.maxReplicas (not $v.disaggregation.enabled) -}}{{- $_ := set $args "autoscaling" (dict "max_replicas" (int $v.autoscaler.maxReplicas)) -}}{{- end -}}
{{- if $v.model.servedName -}}{{- $_ := set $args "served_model_name" $v.model.servedName -}}{{- end -}}
{{- if $v.model.maxLen -}}{{- $_ := set $args "max_model_len" (int $v.model.maxLen) -}}{{- end -}}
{{- if gt (int $v.pods.hostsPerReplica) 1 -}}{{- $_ := set $args "rank_placement" "PACK" -}}{{- end -}}
{{- if $v.tenants.secretName -}}{{- $_ := set $args "tenants" (dict "file" (printf "/etc/shoal/tenants/%s" $v.tenants.key)) -}}{{- end -}}
{{- $each := div (int ($v.pods.cpu | default (mul 4 (int $v.pods.replicasPerPod)))) (int $v.pods.replicasPerPod) -}}
{{- if eq $v.device "gpu" -}}
{{- $_ := set $args "num_gpus_per_replica" $tp -}}
{{- else if eq $tp 1 -}}
{{- $_ := set $args "num_cpus_per_replica" $each -}}
{{- $_ := set $args "threads_per_replica" $each -}}
{{- else -}}
{{- $threads := div (sub $each 1) (div $tp (int $v.pods.hostsPerReplica)) -}}
{{- $_ := set $args "num_cpus_per_replica" 1 -}}
{{- $_ := set $args "num_cpus_per_rank" $threads -}}
{{- $_ := set $args "threads_per_replica" $threads -}}
{{- end -}}
{{- mergeOverwrite $args (deepCopy $v.config) | toYaml -}}
{{- end -}}

{{- define "shoal.serveConfig" -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: 8000
  keep_alive_timeout_s: 90
applications:
  - name: shoal
    import_path: cluster.app:build
    route_prefix: /
    args:
      {{- include "shoal.args" . | nindent 6 }}
    # what changes without replacing anybody, laid over args; all deployments need the same
    deployments:
{{- range ternary (list "Prefill" "Decode" "Router") (list "Replica" "Router") .Values.disaggregation.enabled }}
      - name: {{ . }}
        user_config: {{- $.Values.userConfig | toYaml | nindent 10 }}
{{- end }}
{{- end -}}
