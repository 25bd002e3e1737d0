{{- /* What can not work is refused here, in a sentence. What a value may be at all says values.schema.json. */ -}}
{{- define "shoal.refuse" -}}
{{- $v := .Values -}}
{{- $pods := $v.pods -}}
{{- $tp := int $v.tensorParallel -}}
{{- $hosts := int $pods.hostsPerReplica -}}
{{- $each := int $pods.replicasPerPod -}}
{{- if not $v.model.id -}}
{{- fail "model.id is empty; give a built-in name, a Hugging Face id or a folder in the image" -}}
{{- end -}}
{{- if not $v.image.tag -}}
{{- fail "image.tag is empty; all nodes of a Ray cluster need the same image, so name one: SHOAL-rayRAY-pyPYTHON" -}}
{{- end -}}
{{- if gt (len .Release.Name) 47 -}}
{{- fail (printf "the release name %q has %d characters; a RayService has at most 47" .Release.Name (len .Release.Name)) -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" .Release.Name) -}}
{{- fail (printf "the release name %q: a RayService begins with a letter and has a-z, 0-9 and - only" .Release.Name) -}}
{{- end -}}
{{- if and (gt $hosts 1) (gt $each 1) -}}
{{- fail (printf "pods.hostsPerReplica is %d and pods.replicasPerPod is %d; a replica over several pods has them to itself: one must be 1" $hosts $each) -}}
{{- end -}}
{{- if mod $tp $hosts -}}
{{- fail (printf "tensorParallel %d is not a multiple of pods.hostsPerReplica %d: every pod of a replica has the same number of ranks" $tp $hosts) -}}
{{- end -}}
{{- $ranks := mul (div $tp $hosts) $each -}}
{{- if and (eq $v.device "gpu") (gt (int $ranks) (int $pods.gpusPerNode)) -}}
{{- fail (printf "a pod would need %d GPUs (tensorParallel %d x replicasPerPod %d / hostsPerReplica %d) and a node has %d (pods.gpusPerNode): it would be pending for ever. Lower tensorParallel or raise pods.hostsPerReplica" (int $ranks) $tp $each $hosts (int $pods.gpusPerNode)) -}}
{{- end -}}
{{- $need := add $ranks $each -}}
{{- if and (eq $v.device "cpu") (eq $tp 1) -}}{{- $need = $each -}}{{- end -}}
{{- if and $pods.cpu (lt (int $pods.cpu) (int $need)) -}}
{{- fail (printf "pods.cpu is %d; a pod with %d replica(s) and %d rank(s) needs at least %d: one for each replica and each rank" (int $pods.cpu) $each (int $ranks) (int $need)) -}}
{{- end -}}
{{- if and (eq $v.device "cpu") (gt $tp 1) (not $pods.cpu) (lt (mul 4 $each) $need) -}}
{{- fail (printf "pods.cpu must be given: %d ranks on CPUs need at least %d, and the default for a CPU pod is %d" (int $ranks) (int $need) (int (mul 4 $each))) -}}
{{- end -}}
{{- if and $pods.shmGiB $pods.memoryGiB (ge (int $pods.shmGiB) (int $pods.memoryGiB)) -}}
{{- fail (printf "pods.shmGiB %d must be below pods.memoryGiB %d: /dev/shm counts as memory of the pod" (int $pods.shmGiB) (int $pods.memoryGiB)) -}}
{{- end -}}
{{- include "shoal.refuseAround" . -}}
{{- include "shoal.refuseHatches" . -}}
{{- include "shoal.refuseConfig" . -}}
{{- end -}}

{{- define "shoal.refuseAround" -}}
{{- $v := .Values -}}
{{- if and $v.headState.enabled (not $v.headState.passwordSecret) -}}
{{- fail "headState.passwordSecret is empty: the head's state holds the configuration of the cluster. Name an existing Secret (key: headState.passwordKey), or set headState.enabled: false and lose everything with the head" -}}
{{- end -}}
{{- if eq $v.upgrade.strategy "NewClusterWithIncrementalUpgrade" -}}
{{- if not $v.upgrade.gatewayClassName -}}
{{- fail "upgrade.strategy NewClusterWithIncrementalUpgrade shifts traffic through a Gateway: set upgrade.gatewayClassName" -}}
{{- end -}}
{{- if not $v.autoscaler.enabled -}}
{{- fail "upgrade.strategy NewClusterWithIncrementalUpgrade needs Ray's autoscaler: set autoscaler.enabled: true" -}}
{{- end -}}
{{- if gt (int $v.upgrade.stepSizePercent) (int $v.upgrade.maxSurgePercent) -}}
{{- fail (printf "upgrade.stepSizePercent %d is above upgrade.maxSurgePercent %d: no more traffic can move at once than there is room for" (int $v.upgrade.stepSizePercent) (int $v.upgrade.maxSurgePercent)) -}}
{{- end -}}
{{- else if $v.upgrade.gatewayClassName -}}
{{- fail (printf "upgrade.gatewayClassName %q is used by the strategy NewClusterWithIncrementalUpgrade alone, and upgrade.strategy is %s" $v.upgrade.gatewayClassName $v.upgrade.strategy) -}}
{{- end -}}
{{- if $v.autoscaler.maxReplicas -}}
{{- if not $v.autoscaler.enabled -}}
{{- fail "autoscaler.maxReplicas is given and autoscaler.enabled is false: nothing would add a replica" -}}
{{- end -}}
{{- $most := int $v.replicas -}}
{{- if $v.disaggregation.enabled -}}
{{- $most = max (int $v.disaggregation.prefill.replicas) (int $v.disaggregation.decode.replicas) -}}
{{- end -}}
{{- if lt (int $v.autoscaler.maxReplicas) (int $most) -}}
{{- fail (printf "autoscaler.maxReplicas %d is below the %d replicas that are asked for: they would wait for pods for ever" (int $v.autoscaler.maxReplicas) (int $most)) -}}
{{- end -}}
{{- end -}}
{{- if and $v.cache.size $v.cache.existingClaim -}}
{{- fail "cache.size makes a claim and cache.existingClaim names one; give only one of them" -}}
{{- end -}}
{{- if and $v.cache.size (eq $v.cache.accessMode "ReadWriteOnce") -}}
{{- fail "cache.accessMode ReadWriteOnce: the claim is mounted by pods on several nodes, and all but those of one node would never start; use ReadWriteMany, or no cache.size" -}}
{{- end -}}
{{- if and $v.disaggregation.enabled (ne (int $v.replicas) 1) -}}
{{- fail (printf "replicas is %d and disaggregation.enabled is true; then disaggregation.prefill.replicas and disaggregation.decode.replicas count" (int $v.replicas)) -}}
{{- end -}}
{{- if and $v.rayAuth.secretName (not $v.rayAuth.enabled) -}}
{{- fail (printf "rayAuth.secretName is %q and rayAuth.enabled is false: the token would not be asked for" $v.rayAuth.secretName) -}}
{{- end -}}
{{- if not (or $v.rayAuth.enabled $v.clusterToken.secretName) -}}
{{- fail "clusterToken.secretName is empty and rayAuth.enabled is false: replicas and routers would have no token to know each other by. Name an existing Secret (key: clusterToken.key)" -}}
{{- end -}}
{{- if and (or $v.httpRoute.enabled $v.ingress.enabled) $v.networkPolicy.enabled (not $v.networkPolicy.clients) -}}
{{- fail "networkPolicy.clients is empty: then only pods of this namespace get in, and what httpRoute or ingress bring comes from the gateway's pods. Name these in networkPolicy.clients" -}}
{{- end -}}
{{- if and $v.httpRoute.enabled (not $v.httpRoute.parentRefs) -}}
{{- fail "httpRoute.parentRefs is empty: name the Gateway, as [{name: gateway, namespace: infra}]" -}}
{{- end -}}
{{- if and $v.httpRoute.enabled (eq $v.upgrade.strategy "NewClusterWithIncrementalUpgrade") -}}
{{- fail "httpRoute.enabled: with upgrade.strategy NewClusterWithIncrementalUpgrade the operator makes a Gateway and a route of its own, and ours would pass by the weights of the upgrade" -}}
{{- end -}}
{{- $host := 0.0 -}}
{{- with $v.config.kv_cache -}}{{- $host = float64 (.host_tier_gib | default 0) -}}{{- end -}}
{{- $size := include "shoal.size" . | fromYaml -}}
{{- if gt $host 0.0 -}}
{{- if ge (addf $host $size.shm) (float64 $size.memory) -}}
{{- fail (printf "config.kv_cache.host_tier_gib %v and /dev/shm (%v GiB) leave nothing of a pod's memory of %v GiB: raise pods.memoryGiB" $host $size.shm $size.memory) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "shoal.refuseHatches" -}}
{{- range $part := list "pods" "router" "head" -}}
{{- $place := index $.Values $part -}}
{{- range $name := list "SHOAL_CLUSTER_TOKEN" "SHOAL_CLUSTER_TOKEN_FILE" "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S" "RAY_REDIS_ADDRESS" "REDIS_PASSWORD" "RAY_AUTH_MODE" "RAY_AUTH_TOKEN" "HF_TOKEN" -}}
{{- if hasKey $place.env $name -}}
{{- fail (printf "%s.env.%s follows from other values (drain, headState, rayAuth, clusterToken, hfToken); set those" $part $name) -}}
{{- end -}}
{{- end -}}
{{- $names := list "shm" "ray" "models" "tenants" -}}
{{- range $place.volumes -}}
{{- if has .name $names -}}
{{- fail (printf "%s.volumes: the name %s is taken; give another one" $part .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- range $place.volumeMounts -}}
{{- if not (has .name $names) -}}
{{- fail (printf "%s.volumeMounts: no volume is called %s; known: %s" $part .name (join ", " $names)) -}}
{{- end -}}
{{- end -}}
{{- range $key := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "shoal/component" -}}
{{- if hasKey (dig "metadata" "labels" (dict) $place.podTemplate) $key -}}
{{- fail (printf "%s.podTemplate.metadata.labels.%s: policies, budgets and monitors select by it; it can not be another one" $part $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "shoal.refuseConfig" -}}
{{- /* key of ClusterConfig: the value it follows from; cluster/k8s/values.py has the same table */ -}}
{{- $derived := dict
  "model" "model.id"
  "served_model_name" "model.servedName"
  "max_model_len" "model.maxLen"
  "replicas.both" "replicas"
  "replicas.prefill" "disaggregation.prefill.replicas"
  "replicas.decode" "disaggregation.decode.replicas"
  "autoscaling.max_replicas" "autoscaler.maxReplicas"
  "tensor_parallel_size" "tensorParallel"
  "num_gpus_per_replica" "device, tensorParallel"
  "rank_placement" "pods.hostsPerReplica"
  "node_label" "nothing: the chart labels its own nodes"
  "drain_s" "drain.seconds"
  "longest_stream_s" "drain.longestStreamSeconds"
  "router.replicas" "router.replicas"
  "tenants.file" "tenants.secretName"
  "http.api_keys" "tenants.secretName: a key in a manifest can be read by whoever reads the manifest" -}}
{{- $config := .Values.config -}}
{{- range $key, $place := $derived -}}
{{- $found := $config -}}
{{- range $part := splitList "." $key -}}
{{- if kindIs "map" $found -}}{{- $found = index $found $part -}}{{- else -}}{{- $found = "" -}}{{- end -}}
{{- end -}}
{{- if not (kindIs "invalid" $found) -}}{{- if ne (toString $found) "" -}}
{{- fail (printf "config.%s: set %s" $key $place) -}}
{{- end -}}{{- end -}}
{{- end -}}
{{- end -}}
