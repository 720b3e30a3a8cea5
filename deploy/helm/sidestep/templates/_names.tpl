{{- define "sidestep.labels" -}}
app.kubernetes.io/name: sidestep
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "sidestep.fullname" -}}
{{- if contains "sidestep" .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-sidestep" (.Release.Name | trunc 40 | trimSuffix "-") }}
{{- end -}}
{{- end -}}
