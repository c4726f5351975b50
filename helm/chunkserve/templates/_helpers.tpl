{{- define "chunkserve.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* Labels of everything; with a component, of pods and what selects them. */}}
{{- define "chunkserve.selector" -}}
app.kubernetes.io/name: chunkserve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "chunkserve.labels" -}}
{{ include "chunkserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* The settings that pods run with: the values, and where the API keys lie. */}}
{{- define "chunkserve.settings" -}}
{{- $settings := deepCopy .Values.settings -}}
{{- with .Values.secrets.apiKeys -}}
{{- if .name -}}
{{- $_ := set $settings.server "api_key_file" (printf "/etc/chunkserve/keys/%s" .key) -}}
{{- end -}}
{{- end -}}
{{- toYaml $settings -}}
{{- end }}

{{- define "chunkserve.image" -}}
{{- $default := ternary (printf "%s-gpu" .Chart.AppVersion) .Chart.AppVersion (eq .Values.settings.model.device "cuda") -}}
{{- printf "%s:%s" .Values.image.repository (default $default .Values.image.tag) -}}
{{- end }}

{{- define "chunkserve.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
{{- end }}

{{/* A container's environment: where it keeps what it fetches, and what it may fetch with. */}}
{{- define "chunkserve.environment" -}}
- name: XDG_CACHE_HOME
  value: /cache
- name: HF_HOME
  value: /cache/huggingface
{{- with .Values.secrets.hubToken }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .name }}, key: {{ .key }}}
{{- end }}
{{- end }}
{{- if eq .Values.ray.authMode "disabled" }}
# Said in so many words: Ray's own default is another one in each of its programs.
- name: RAY_AUTH_MODE
  value: disabled
{{- end }}
{{- end }}

{{- define "chunkserve.mounts" -}}
- name: cache
  mountPath: /cache
- name: settings
  mountPath: /etc/chunkserve/settings
  readOnly: true
{{- if .Values.secrets.apiKeys.name }}
- name: keys
  mountPath: /etc/chunkserve/keys
  readOnly: true
{{- end }}
{{- end }}

{{/* A pod of a Ray cluster. Takes root, component (service or batch), group (head or worker) and its values. */}}
{{- define "chunkserve.pod" -}}
{{- $values := .root.Values -}}
{{- $port := $values.settings.server.port -}}
{{- $serves := eq .component "service" -}}
metadata:
  labels:
    {{- include "chunkserve.selector" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
  annotations:
    # Another model is prepared by new pods: this lets KubeRay see that they must be new.
    chunkserve/model: {{ $values.settings.model.path | quote }}
spec:
  # Only the autoscaler, in the head's pod, speaks to Kubernetes.
  automountServiceAccountToken: {{ and (eq .group "head") $values.autoscaling.enabled }}
  securityContext:
    runAsNonRoot: true
    runAsUser: {{ $values.security.runAsUser }}
    runAsGroup: {{ $values.security.runAsGroup }}
    fsGroup: {{ $values.security.runAsGroup }}
    seccompProfile: {type: RuntimeDefault}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  initContainers:
    - name: prepare
      image: {{ include "chunkserve.image" .root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      command: [chunkserve, prepare, --config, /etc/chunkserve/settings/settings.yaml]
      env:
        {{- include "chunkserve.environment" .root | nindent 8 }}
      resources:
        {{- toYaml .pod.resources | nindent 8 }}
      securityContext:
        {{- include "chunkserve.containerSecurity" .root | nindent 8 }}
      volumeMounts:
        {{- include "chunkserve.mounts" .root | nindent 8 }}
  containers:
    - name: ray-{{ .group }}
      image: {{ include "chunkserve.image" .root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      env:
        {{- include "chunkserve.environment" .root | nindent 8 }}
      ports:
        {{- if eq .group "head" }}
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
        {{- end }}
        - {name: metrics, containerPort: 8080}
        {{- if $serves }}
        - {name: serve, containerPort: {{ $port }}}
        {{- end }}
      {{- if and $serves (eq .group "worker") }}
      # KubeRay adds a liveness probe of Ray itself. /health/live is none: a restart would break streams that go on.
      readinessProbe:
        httpGet: {path: /health, port: serve}
        {{- toYaml $values.probes.readiness | nindent 8 }}
      {{- end }}
      {{- $resources := deepCopy .pod.resources }}
      {{- if .pod.gpus }}
      {{- $_ := set $resources "limits" (merge (dict "nvidia.com/gpu" .pod.gpus) (default dict $resources.limits)) }}
      {{- $_ := set $resources "requests" (merge (dict "nvidia.com/gpu" .pod.gpus) (default dict $resources.requests)) }}
      {{- end }}
      resources:
        {{- toYaml $resources | nindent 8 }}
      securityContext:
        {{- include "chunkserve.containerSecurity" .root | nindent 8 }}
      volumeMounts:
        {{- include "chunkserve.mounts" .root | nindent 8 }}
        {{- if and (eq .component "batch") $values.batch.data.claim }}
        - name: data
          mountPath: {{ $values.batch.data.mountPath }}
        {{- end }}
  volumes:
    - name: cache
      {{- if $values.cache.claim }}
      persistentVolumeClaim: {claimName: {{ $values.cache.claim }}}
      {{- else }}
      emptyDir: {sizeLimit: {{ $values.cache.size }}}
      {{- end }}
    - name: settings
      configMap: {name: {{ include "chunkserve.name" .root }}-settings}
    {{- with $values.secrets.apiKeys.name }}
    - name: keys
      secret: {secretName: {{ . }}}
    {{- end }}
    {{- if and (eq .component "batch") $values.batch.data.claim }}
    - name: data
      persistentVolumeClaim: {claimName: {{ $values.batch.data.claim }}}
    {{- end }}
  {{- with .pod.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .pod.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .pod.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* A RayClusterSpec. Takes root and component. */}}
{{- define "chunkserve.cluster" -}}
{{- $values := .root.Values -}}
{{- if ne (gt (int $values.workers.gpus) 0) (eq $values.settings.model.device "cuda") -}}
{{- fail (printf "workers.gpus is %v and settings.model.device is %s: pods have GPUs if and only if engines compute on them (cuda)" $values.workers.gpus $values.settings.model.device) -}}
{{- end -}}
rayVersion: {{ $values.ray.version | quote }}
{{- if eq $values.ray.authMode "token" }}
authOptions:
  mode: token
  {{- with $values.ray.authSecret }}
  secretName: {{ . }}
  {{- end }}
{{- end }}
enableInTreeAutoscaling: {{ $values.autoscaling.enabled }}
{{- if $values.autoscaling.enabled }}
autoscalerOptions:
  version: v2
  idleTimeoutSeconds: {{ $values.autoscaling.idleTimeoutSeconds }}
  securityContext:
    {{- include "chunkserve.containerSecurity" .root | nindent 4 }}
{{- end }}
{{- with $values.gcsFaultTolerance }}
{{- if .enabled }}
gcsFaultToleranceOptions:
  redisAddress: {{ .redisAddress | quote }}
  {{- with .externalStorageNamespace }}
  externalStorageNamespace: {{ . | quote }}
  {{- end }}
  {{- if .redisUsername.name }}
  redisUsername:
    valueFrom:
      secretKeyRef: {name: {{ .redisUsername.name }}, key: {{ .redisUsername.key }}}
  {{- end }}
  {{- if .redisPassword.name }}
  redisPassword:
    valueFrom:
      secretKeyRef: {name: {{ .redisPassword.name }}, key: {{ .redisPassword.key }}}
  {{- end }}
{{- end }}
{{- end }}
headGroupSpec:
  rayStartParams:
    dashboard-host: 0.0.0.0
    # Engines and front ends go to workers: a busy head would hold up all of them.
    num-cpus: "0"
  template:
    {{- include "chunkserve.pod" (dict "root" .root "component" .component "group" "head" "pod" $values.head) | nindent 4 }}
workerGroupSpecs:
  - groupName: engines
    replicas: {{ $values.workers.replicas }}
    {{- if $values.autoscaling.enabled }}
    minReplicas: {{ $values.autoscaling.minReplicas }}
    maxReplicas: {{ $values.autoscaling.maxReplicas }}
    {{- else }}
    minReplicas: {{ $values.workers.replicas }}
    maxReplicas: {{ $values.workers.replicas }}
    {{- end }}
    rayStartParams: {}
    template:
      {{- include "chunkserve.pod" (dict "root" .root "component" .component "group" "worker" "pod" $values.workers) | nindent 6 }}
{{- end }}
