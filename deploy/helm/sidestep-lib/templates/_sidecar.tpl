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
runAsUser: 65532
runAsGroup: 65532
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
{{- if $sidestep.forward.endpoint }}
- name: sidestep-keys
  image: {{ include "sidestep.image" . }}
  imagePullPolicy: {{ $sidestep.image.pullPolicy }}
  command: [install, -m, "0400", -t, /run/sidestep-keys, /etc/sidestep/forward/exporter.pub, /etc/sidestep/forward/sidecar.key]
  securityContext:
    {{- include "sidestep.securityContext" . | nindent 4 }}
  resources:
    requests: {cpu: 250m, memory: 64Mi}
    limits: {cpu: 250m, memory: 64Mi}
  volumeMounts:
    - name: sidestep-keys
      mountPath: /run/sidestep-keys
    - name: sidestep-forward
      mountPath: /etc/sidestep/forward
      readOnly: true
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
    {{- if $sidestep.forward.endpoint }}
    - --web.listen-address=
    {{- end }}
    {{- range $sidestep.extraArgs }}
    - {{ . | quote }}
    {{- end }}
  {{- if or $sidestep.forward.endpoint $sidestep.extraEnv }}
  env:
    {{- if $sidestep.forward.endpoint }}
    - name: SIDESTEP_FORWARD
      value: {{ $sidestep.forward.endpoint | quote }}
    - name: POD_NAMESPACE
      valueFrom:
        fieldRef:
          fieldPath: metadata.namespace
    - name: POD_NAME
      valueFrom:
        fieldRef:
          fieldPath: metadata.name
    - name: SIDESTEP_FORWARD_SOURCE
      value: $(POD_NAMESPACE)/$(POD_NAME)
    - name: SIDESTEP_FORWARD_LABEL
      value: namespace=$(POD_NAMESPACE) pod=$(POD_NAME)
    - name: SIDESTEP_SERVER_KEY
      value: /run/sidestep-keys/exporter.pub
    - name: SIDESTEP_CLIENT_KEY
      value: /run/sidestep-keys/sidecar.key
    {{- end }}
    {{- with $sidestep.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  {{- if $sidestep.forward.endpoint }}
  startupProbe:
    exec:
      command: [test, -S, /run/sidestep/ingest/ingest.ipc]
    periodSeconds: 1
    timeoutSeconds: 5
    failureThreshold: 60
  {{- else }}
  ports:
    - name: sidestep
      containerPort: 9857
  startupProbe:
    httpGet: {path: /-/ready, port: sidestep}
    periodSeconds: 1
    failureThreshold: 60
  livenessProbe:
    httpGet: {path: /-/healthy, port: sidestep}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
    terminationGracePeriodSeconds: 5 # not the pod's: it is frozen
  {{- end }}
  securityContext:
    {{- include "sidestep.securityContext" . | nindent 4 }}
  resources:
    {{- toYaml $sidestep.resources | nindent 4 }}
  volumeMounts:
    - name: sidestep-socket
      mountPath: /run/sidestep
    - name: sidestep-state
      mountPath: /var/lib/sidestep
    {{- if $sidestep.forward.endpoint }}
    - name: sidestep-keys
      mountPath: /run/sidestep-keys
      readOnly: true
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
{{- if $sidestep.forward.endpoint }}
- name: sidestep-keys
  emptyDir:
    medium: Memory
    sizeLimit: 1Mi
- name: sidestep-forward
  secret:
    secretName: {{ required "sidestep-lib.forward.secret: name the secret with exporter.pub and sidecar.key" $sidestep.forward.secret }}
    defaultMode: 0444
{{- end }}
{{- end -}}

{{- /* Of the engine. A chart that sets PYTHONPATH itself puts /opt/sidestep/plugin: before it and leaves this one's away. */}}
{{- define "sidestep.env" -}}
- name: SIDESTEP_ENDPOINT
  value: ipc:///run/sidestep/ingest/ingest.ipc
- name: SIDESTEP_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: PYTHONPATH
  value: /opt/sidestep/plugin
{{- end -}}

{{- define "sidestep.volumeMounts" -}}
- name: sidestep-socket
  mountPath: /run/sidestep
- name: sidestep-plugin
  mountPath: /opt/sidestep/plugin
  readOnly: true
{{- end -}}

{{- /* Of the engine, whose container asks the sidecar: they share the pod's network. */}}
{{- define "sidestep.readinessProbe" -}}
{{- $sidestep := index .Values "sidestep-lib" -}}
{{- if $sidestep.readinessProbe.enabled -}}
{{- if $sidestep.forward.endpoint -}}
{{- fail "sidestep-lib.readinessProbe.enabled: a pod that forwards has no page to probe" -}}
{{- end -}}
readinessProbe:
  httpGet: {path: "/-/engines?ready", port: 9857}
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
