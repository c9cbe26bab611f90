{{/* What the cluster holds. Without one (`helm template`), lookups find nothing, and these are empty. */}}

{{/* Whether Helm can see the cluster. */}}
{{- define "spottrain.isLive" -}}
{{- if (lookup "v1" "Namespace" "" "kube-system") }}true{{ end }}
{{- end }}

{{/* Whether a node's labels meet a node affinity's requirement. Takes labels and expressions. */}}
{{- define "spottrain.matches" -}}
{{- $labels := .labels }}
{{- $all := true }}
{{- range .expressions }}
{{- $in := and (hasKey $labels .key) (has (index $labels .key) (.values | default list)) }}
{{- if eq .operator "In" }}{{ $all = and $all $in }}
{{- else if eq .operator "NotIn" }}{{ $all = and $all (not $in) }}
{{- else if eq .operator "Exists" }}{{ $all = and $all (hasKey $labels .key) }}
{{- else if eq .operator "DoesNotExist" }}{{ $all = and $all (not (hasKey $labels .key)) }}
{{- end }}
{{- end }}
{{- if $all }}true{{ end }}
{{- end }}

{{/* Whether a pod with this affinity and node selector may run on a node. Takes labels, affinity and selector. */}}
{{- define "spottrain.selects" -}}
{{- $labels := .labels }}
{{- $required := dig "nodeAffinity" "requiredDuringSchedulingIgnoredDuringExecution" "nodeSelectorTerms" list (.affinity | default dict) }}
{{- $any := empty $required }}
{{- range $required }}
{{- if include "spottrain.matches" (dict "labels" $labels "expressions" .matchExpressions) }}{{ $any = true }}{{ end }}
{{- end }}
{{- range $key, $value := .selector | default dict }}
{{- if not (and (hasKey $labels $key) (eq (index $labels $key) $value)) }}{{ $any = false }}{{ end }}
{{- end }}
{{- if $any }}true{{ end }}
{{- end }}

{{/* What this cluster lacks, a paragraph each. */}}
{{- define "spottrain.missing" -}}
{{- $spot := 0 }}
{{- $homes := 0 }}
{{- $gpus := 0 }}
{{- $ofWatcher := include "spottrain.affinity" (dict "root" . "affinity" .Values.watcher.affinity "operator" "In") | fromYaml }}
{{- $ofOperator := include "spottrain.affinity" (dict "root" . "affinity" .Values.affinity "operator" "NotIn") | fromYaml }}
{{- $nodes := (lookup "v1" "Node" "" "").items }}
{{- range $nodes }}
{{- $labels := .metadata.labels | default dict }}
{{- if include "spottrain.selects" (dict "labels" $labels "affinity" $ofWatcher "selector" $.Values.watcher.nodeSelector) }}
{{- $spot = add1 $spot }}
{{- end }}
{{- if include "spottrain.selects" (dict "labels" $labels "affinity" $ofOperator "selector" $.Values.nodeSelector) }}
{{- $homes = add1 $homes }}
{{- end }}
{{- $gpus = dig "status" "allocatable" "nvidia.com/gpu" "0" . | int | add $gpus }}
{{- end }}
{{- if $nodes }}
{{- if not $homes }}
- The operator finds no node: none has the labels that `affinity` and `nodeSelector` ask for. By default, these are nodes
  that are not spot. Add one, or set both.
{{- end }}
{{- if not $spot }}
- No spot node: none has the labels that `watcher.affinity` asks for. That is fine if an autoscaler adds spot nodes for
  pods. Otherwise, add a spot pool, or name the labels of yours in `spotLabels`.
{{- end }}
{{- if not $gpus }}
- No GPU: no node offers nvidia.com/gpu. That is fine if an autoscaler adds GPU nodes for pods. Otherwise, install the
  driver and NVIDIA's device plugin: pods of jobs wait until then.
{{- end }}
{{- if not .Values.watcher.enabled }}
- No watcher of this release, as `watcher.enabled` is false. Unless another release has them, jobs learn of a preemption only
  what Kubernetes says about nodes and pods.
{{- end }}
{{- with lookup "apps/v1" "DaemonSet" .Release.Namespace (printf "%s-watcher" .Release.Name) }}
{{- $wanted := .status.desiredNumberScheduled | int }}
{{- $ready := .status.numberReady | default 0 | int }}
{{- if lt $ready $wanted }}
- Before this upgrade, the watcher was ready on {{ $ready }} of {{ $wanted }} spot nodes. See
  `kubectl --namespace {{ $.Release.Namespace }} describe daemonset {{ .metadata.name }}`.
{{- end }}
{{- end }}
{{- include "spottrain.missingCrd" . }}
{{- include "spottrain.refusedWatcher" . }}
{{- end }}
{{- end }}

{{/* With crds.enabled, they come with this release. */}}
{{- define "spottrain.missingCrd" -}}
{{- $apply := "helm template CHART --show-only templates/crds.yaml | kubectl apply --server-side --force-conflicts --field-manager=helm -f -" }}
{{- if not .Values.crds.enabled }}
{{- range $path, $_ := .Files.Glob "definitions/*.yaml" }}
{{- $ours := $.Files.Get $path | fromYaml }}
{{- $found := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" $ours.metadata.name }}
{{- if not $found }}
- No CRD {{ $ours.metadata.name }}: the operator waits for it. Set `crds.enabled`, or apply it:
  {{ $apply }}
{{- else if ne (toJson (first $found.spec.versions).schema) (toJson (first $ours.spec.versions).schema) }}
- The CRD {{ $ours.metadata.name }} is that of another version. If this release is the newer one, upgrade the release that
  installs the CRDs (`crds.enabled`), or apply the new one:
  {{ $apply }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Pod Security of the namespace. Without its label, the cluster's default holds, which can't be seen. */}}
{{- define "spottrain.refusedWatcher" -}}
{{- $level := dig "metadata" "labels" "pod-security.kubernetes.io/enforce" "" (lookup "v1" "Namespace" "" .Release.Namespace) }}
{{- if and .Values.watcher.enabled $level (ne $level "privileged") }}
- The namespace {{ .Release.Namespace }} enforces Pod Security "{{ $level }}", which refuses the watcher: it is on the host
  network, from which it reads the cloud's metadata. Allow it:
  kubectl label --overwrite namespace {{ .Release.Namespace }} pod-security.kubernetes.io/enforce=privileged
{{- end }}
{{- end }}
