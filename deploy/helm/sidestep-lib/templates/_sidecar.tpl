{{/*
What a chart adds to its engine's pod, each a list's items; docs/kubernetes.md shows where:
sidestep.initContainers, sidestep.volumes, sidestep.env, sidestep.volumeMounts, sidestep.supplementalGroups,
sidestep.terminationGracePeriodSeconds. Not a list, and nothing unless it is enabled: sidestep.readinessProbe.
*/}}
{{- define "sidestep.image" -}}
{{- $image := (index .Values "sidestep-lib").image -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag }}
{{- end -}}
{{- end -}}

{{- define "sidestep.securityContext" -}}
runAsNonRoot: true
{{- if (index .Values "sidestep-lib").fixedUser }}
runAsUser: 65532
runAsGroup: 65532
{{- end }}
readOnlyRootFilesystem: true
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "sidestep.initContainers" -}}
{{- $sidestep := index .Values "sidestep-lib" -}}
{{- if $sidestep.plugin.enabled }}
- name: sidestep-plugin
  image: {{ include "sidestep.image" . }}
  imagePullPolicy: {{ $sidestep.image.pullPolicy }}
  command: [cp, -R, /opt/sidestep/plugin/., /plugin]
  securityContext:
    {{- include "sidestep.securityContext" . | nindent 4 }}
  resources:
    requests: {cpu: 250m, memory: 64Mi}
    limits: {cpu: 250m, memory: 64Mi}
  volumeMounts:
    - name: sidestep-plugin
      mountPath: /plugin
{{- end }}
- name: sidestep
  image: {{ include "sidestep.image" . }}
  imagePullPolicy: {{ $sidestep.image.pullPolicy }}
  restartPolicy: Always
  args:
    - serve
    - --ingest.endpoint=ipc:///run/sidestep/ingest/ingest.ipc
    - --ingest.ipc-group=65532
    - --state.dir=/var/lib/sidestep/state
    - --shutdown.linger={{ $sidestep.lingerSeconds }}
    - --limits.memory-soft={{ $sidestep.memory.soft }}
    - --limits.memory-hard={{ $sidestep.memory.hard }}
    {{- range $sidestep.extraArgs }}
    - {{ . | quote }}
    {{- end }}
  {{- with $sidestep.extraEnv }}
  env:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  ports:
    - name: sidestep
      containerPort: 9857
  startupProbe:
    httpGet: {{ merge (dict "path" "/-/ready" "port" "sidestep") $sidestep.probeHttpGet | toJson }}
    periodSeconds: 1
    failureThreshold: 60
  livenessProbe:
    httpGet: {{ merge (dict "path" "/-/healthy" "port" "sidestep") $sidestep.probeHttpGet | toJson }}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
    terminationGracePeriodSeconds: 5 # not the pod's: it is frozen
  securityContext:
    {{- include "sidestep.securityContext" . | nindent 4 }}
  resources:
    {{- toYaml $sidestep.resources | nindent 4 }}
  volumeMounts:
    - name: sidestep-socket
      mountPath: /run/sidestep
    - name: sidestep-state
      mountPath: /var/lib/sidestep
    {{- with $sidestep.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "sidestep.volumes" -}}
{{- $sidestep := index .Values "sidestep-lib" -}}
{{- if $sidestep.plugin.enabled }}
- name: sidestep-plugin
  emptyDir:
    sizeLimit: 16Mi
{{- end }}
- name: sidestep-socket
  emptyDir:
    medium: Memory
    sizeLimit: 16Mi
- name: sidestep-state
  emptyDir:
    medium: Memory
    sizeLimit: 64Mi
{{- end -}}

{{- /* Of the engine. A chart that sets PYTHONPATH itself puts /opt/sidestep/plugin: before it and leaves this one's away.
Without plugin.enabled the engine's image has the plugin, or the engine needs none. */}}
{{- define "sidestep.env" -}}
{{- $sidestep := index .Values "sidestep-lib" -}}
- name: SIDESTEP_ENDPOINT
  value: ipc:///run/sidestep/ingest/ingest.ipc
- name: SIDESTEP_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
{{- if $sidestep.plugin.enabled }}
- name: PYTHONPATH
  value: /opt/sidestep/plugin
{{- end -}}
{{- end -}}

{{- define "sidestep.volumeMounts" -}}
{{- $sidestep := index .Values "sidestep-lib" -}}
- name: sidestep-socket
  mountPath: /run/sidestep
{{- if $sidestep.plugin.enabled }}
- name: sidestep-plugin
  mountPath: /opt/sidestep/plugin
  readOnly: true
{{- end -}}
{{- end -}}

{{- /* Of the engine, whose container asks the sidecar: they share the pod's network. */}}
{{- define "sidestep.readinessProbe" -}}
{{- $sidestep := index .Values "sidestep-lib" -}}
{{- if $sidestep.readinessProbe.enabled -}}
readinessProbe:
  httpGet: {{ merge (dict "path" "/-/engines?ready" "port" 9857) $sidestep.probeHttpGet | toJson }}
  periodSeconds: {{ $sidestep.readinessProbe.periodSeconds }}
  timeoutSeconds: 2
  failureThreshold: {{ $sidestep.readinessProbe.failureThreshold }}
{{- end -}}
{{- end -}}

{{- define "sidestep.supplementalGroups" -}}
- 65532
{{- end -}}

{{- /* The engine ends first; the exporter then lingers, and takes up to 2 s for its last snapshot. */}}
{{- define "sidestep.terminationGracePeriodSeconds" -}}
{{- $sidestep := index .Values "sidestep-lib" -}}
{{ add $sidestep.engineStopSeconds $sidestep.lingerSeconds 2 }}
{{- end -}}
