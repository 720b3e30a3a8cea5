{{- /* Of a chart's context and labels that one resource has besides. By toYaml: a name may look like a number, and a key be in both. */}}
{{- define "sidestep.labels" -}}
{{- $context := first . -}}
{{- $own := dict "app.kubernetes.io/name" "sidestep" "app.kubernetes.io/instance" $context.Release.Name "app.kubernetes.io/version" $context.Chart.AppVersion "app.kubernetes.io/managed-by" $context.Release.Service -}}
{{ toYaml (merge (dict) (last .) $context.Values.commonLabels $own) }}
{{- end -}}

{{- define "sidestep.fullname" -}}
{{- $name := .Release.Name | trunc 40 | trimAll "-." -}}
{{- if contains "sidestep" .Release.Name -}}
{{ $name }}
{{- else -}}
{{ $name }}-sidestep
{{- end -}}
{{- end -}}
