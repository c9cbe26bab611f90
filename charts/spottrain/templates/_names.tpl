{{- define "spottrain.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ with .Values.image.digest }}@{{ . }}{{ end }}
{{- end }}

{{- define "spottrain.labels" -}}
{{ include "spottrain.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "spottrain.selector" -}}
app.kubernetes.io/name: spottrain
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* The user as which the pods of a part call the API server. */}}
{{- define "spottrain.username" -}}
system:serviceaccount:{{ .root.Release.Namespace }}:{{ .root.Release.Name }}-{{ .component }}
{{- end }}

{{- define "spottrain.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "spottrain.podSecurity" -}}
runAsNonRoot: true
{{- if not .Values.namespacesAssignIds }}
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/*
An affinity, with spotLabels if it asks for labels of nodes. Takes root, affinity and operator: In adds a term for each
label, NotIn adds each label to every term.
*/}}
{{- define "spottrain.affinity" -}}
{{- $affinity := deepCopy (.affinity | default dict) }}
{{- $required := dig "nodeAffinity" "requiredDuringSchedulingIgnoredDuringExecution" dict $affinity }}
{{- $operator := .operator }}
{{- if $required.nodeSelectorTerms }}
{{- range $key, $value := .root.Values.spotLabels }}
{{- $label := dict "key" $key "operator" $operator "values" (list $value) }}
{{- if eq $operator "In" }}
{{- $_ := set $required "nodeSelectorTerms" (append $required.nodeSelectorTerms (dict "matchExpressions" (list $label))) }}
{{- else }}
{{- range $term := $required.nodeSelectorTerms }}
{{- $_ := set $term "matchExpressions" (append ($term.matchExpressions | default list) $label) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- if $affinity }}
{{- toYaml $affinity }}
{{- end }}
{{- end }}

{{/* Labels as text: key=value,key=value. */}}
{{- define "spottrain.pairs" -}}
{{- $pairs := list }}
{{- range $key, $value := . }}
{{- $pairs = append $pairs (printf "%s=%v" $key $value) }}
{{- end }}
{{- join "," $pairs }}
{{- end }}

{{/* The Secret of the control API's certificate: SECRET_NAME in certificate_keeper.py. */}}
{{- define "spottrain.controlSecret" -}}
spottrain-control-tls
{{- end }}

{{- define "spottrain.controlHost" -}}
{{ .Release.Name }}-operator.{{ .Release.Namespace }}.svc
{{- end }}

{{/* Where agents reach the operator. */}}
{{- define "spottrain.controlUrl" -}}
https://{{ include "spottrain.controlHost" . }}:{{ .Values.operator.port }}
{{- end }}

{{/* Where the operator's pods run, and how they get their image. */}}
{{- define "spottrain.operatorPlacement" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "spottrain.affinity" (dict "root" . "affinity" .Values.affinity "operator" "NotIn") }}
affinity: {{- . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
