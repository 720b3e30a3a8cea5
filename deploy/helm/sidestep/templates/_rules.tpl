{{/* Written by `make docs` from deploy/rules. Do not edit. */}}
{{- define "sidestep.rules" -}}alerts recording{{- end -}}
{{- define "sidestep.rules.alerts" -}}
{{`# Alerts, on top of recording.yaml. critical: users are hurt now, page; warning: look at it in working hours.
# Where requests wait, the summary names the limit that kept them waiting for the largest share of the busy time.
# Nothing here can fire for an engine that is idle, scaled to zero or not there: docs/alerting.md says how each is kept quiet.
# `}}{{"`"}}{{`sidestep.example`}}{{"`"}}{{` stands for the place where your copies of the runbooks are, `}}{{"`"}}{{`grafana.example`}}{{"`"}}{{` for your Grafana. The
# live page is at the address that Prometheus scrapes.

groups:
  - name: sidestep-engines-alerts
    rules:
      # Without `}}{{"`"}}{{`for`}}{{"`"}}{{`: the exporter's clock decides, whatever the intervals are. A process that is silent is unreachable before 35 s.
      - alert: InferenceEngineStalled
        expr: sidestep_engine_stalled_seconds > 35
        labels: {severity: critical}
        annotations:
          summary: "{{ $labels.model_name }} on {{ $labels.instance }}: engine {{ $labels.engine }} has made no progress for {{ $value | humanizeDuration }}: {{ $labels.reason }}"
          description: >-
            The engine owes requests and hangs. The reason says where: step, no_steps, no_output, publisher, front_end or
            queue. The exporter has the stack of the thread, and a log line with its innermost frames.
          runbook_url: https://sidestep.example/docs/runbooks/InferenceEngineStalled.md
          dashboard_url: "https://grafana.example/d/sidestep-fleet?var-instance={{ $labels.instance | urlquery }}"
          live_page_url: "http://{{ $labels.instance }}/"
      # The exporter forgets an engine after 300 s: the last state counts for half an hour, until as many engines are up
      # as before. An exporter that went with its pod has no series here. Critical:
      # requests were unfinished at the end. A Triton server has an alert of its own.
      - alert: InferenceEngineUnreachable
        expr: |-
          last_over_time(sidestep_engine_unfinished_requests[30m]) > 0
          and ignoring (state) last_over_time(sidestep_engine_state{state="unreachable"}[30m]) == 1
          and on (cluster, namespace, job, instance) (
            instance:sidestep_engine_up:sum
              < quantile_over_time(0.5, instance:sidestep_engine_up:sum[1h])
          )
        for: 1m
        labels: {severity: critical}
        annotations:
          summary: "{{ $labels.model_name }} on {{ $labels.instance }}: engine {{ $labels.engine }} is silent and had {{ $value }} unfinished requests"
          description: >-
            The engine has sent nothing for 30 s, and no goodbye before: it was killed, is frozen, or its host is
            gone. No other engine has taken its place.
          runbook_url: https://sidestep.example/docs/runbooks/InferenceEngineUnreachable.md
          dashboard_url: "https://grafana.example/d/sidestep-fleet?var-instance={{ $labels.instance | urlquery }}"
          live_page_url: "http://{{ $labels.instance }}/"
      - alert: InferenceEngineUnreachable
        expr: |-
          last_over_time(sidestep_engine_state{state="unreachable",engine!~"triton/.*"}[30m]) == 1
          and on (cluster, namespace, job, instance) (
            instance:sidestep_engine_up:sum
              < quantile_over_time(0.5, instance:sidestep_engine_up:sum[1h])
          )
        for: 1m
        labels: {severity: warning}
        annotations:
          summary: "{{ $labels.model_name }} on {{ $labels.instance }}: engine {{ $labels.engine }} is silent"
          description: >-
            The engine has sent nothing for 30 s, and no goodbye before: it was killed, is frozen, or its host is
            gone. No other engine has taken its place.
          runbook_url: https://sidestep.example/docs/runbooks/InferenceEngineUnreachable.md
          dashboard_url: "https://grafana.example/d/sidestep-fleet?var-instance={{ $labels.instance | urlquery }}"
          live_page_url: "http://{{ $labels.instance }}/"
      # What InferenceEngineUnreachable does not know: engines that sent a goodbye.
      # The median forgets a scale-down within half an hour, and does not know an engine that never ran that long.
      - alert: InferenceEngineDown
        expr: |-
          instance:sidestep_engine_up:sum
            < quantile_over_time(0.5, instance:sidestep_engine_up:sum[1h])
          unless on (cluster, namespace, job, instance)
            last_over_time(sidestep_engine_state{state="unreachable"}[30m]) == 1
        for: 2m
        labels: {severity: warning}
        annotations:
          summary: "{{ $labels.instance }}: engines up: {{ $value }}, fewer than for most of the last hour"
          description: >-
            An engine has ended and has not come back. Each process
            of SGLang counts as one.
          runbook_url: https://sidestep.example/docs/runbooks/InferenceEngineDown.md
          dashboard_url: "https://grafana.example/d/sidestep-fleet?var-instance={{ $labels.instance | urlquery }}"
          live_page_url: "http://{{ $labels.instance }}/"
      # An exporter that went with its pod has no series here; engines that drained before they ended had nothing in flight.
      - alert: InferenceModelDown
        expr: |-
          (
            max by (cluster, namespace, job, model_name) (
              last_over_time(instance_model:requests_in_flight:sum[30m])
              and on (cluster, namespace, job, instance) instance:up:max == 1
            ) > 0
          )
          unless on (cluster, namespace, job, model_name) (model:sidestep_engine_up:sum > 0)
        for: 1m
        labels: {severity: critical}
        annotations:
          summary: "{{ $labels.model_name }}: no engine is up, and the last one had {{ $value }} requests in flight"
          description: >-
            All engines of the model have stopped or are silent, and their exporters still respond. Requests
            were in flight, so this was no scale-down of idle engines.
          runbook_url: https://sidestep.example/docs/runbooks/InferenceModelDown.md
          dashboard_url: "https://grafana.example/d/sidestep-fleet?var-model_name={{ $labels.model_name | urlquery }}"
      # All exporters of the model went with it: no target is left that could report an engine as down.
      - alert: InferenceModelAbsent
        expr: |-
          (
            max by (cluster, namespace, job, model_name) (last_over_time(model:requests_running:sum[30m])) > 0
          )
          unless on (cluster, namespace, job, model_name) model:requests_running:sum
          unless on (cluster, namespace, job, model_name) (
            last_over_time(instance_model:requests_in_flight:sum[30m])
            and on (cluster, namespace, job, instance) instance:up:max
          )
        for: 3m
        labels: {severity: critical}
        annotations:
          summary: "{{ $labels.model_name }}: no exporter reports it any more, and its engines had {{ $value }} requests running"
          description: >-
            All targets that reported the model are gone. Requests were running, so this was no scale-down of
            idle engines.
          runbook_url: https://sidestep.example/docs/runbooks/InferenceModelAbsent.md
          dashboard_url: "https://grafana.example/d/sidestep-fleet?var-model_name={{ $labels.model_name | urlquery }}"
      # Without --state.dir an exporter's own restart is a change of the counter, too.
      - alert: InferenceEngineRestarting
        expr: changes(sidestep_engine_restarts_total[1h]) - resets(sidestep_engine_restarts_total[1h]) >= 3
        labels: {severity: warning}
        annotations:
          summary: "{{ $labels.instance }}: engine {{ $labels.engine }} of {{ $labels.model_name }} came back as a new process {{ $value }} times in an hour"
          description: >-
            The engine ends and is started again: it crashes, runs out of memory, or a probe kills it.
          runbook_url: https://sidestep.example/docs/runbooks/InferenceEngineRestarting.md
          dashboard_url: "https://grafana.example/d/sidestep-fleet?var-instance={{ $labels.instance | urlquery }}"
          live_page_url: "http://{{ $labels.instance }}/"
      # Engines that report no progress: those without a plugin.
      - alert: InferenceDecodeStalled
        expr: |-
          min_over_time(engine:requests_running:sum[5m]) > 0
          and engine:processed_tokens:rate5m == 0
          unless ignoring (dialect, sleep_state) vllm:engine_sleep_state{sleep_state="awake"} == 0
          unless on (cluster, namespace, job, instance, pod, model_name) sidestep_engine_unfinished_requests
        for: 2m
        labels: {severity: critical}
        annotations:
          summary: "{{ $labels.model_name }} on {{ $labels.instance }}: {{ $value }} requests are running and no token is computed"
          description: >-
            For five minutes requests were in the batch, no prompt token was computed and none was generated.
            The engine reports no progress, so nothing else shows that its steps do not end.
          runbook_url: https://sidestep.example/docs/runbooks/InferenceDecodeStalled.md
          dashboard_url: "https://grafana.example/d/sidestep-fleet?var-instance={{ $labels.instance | urlquery }}"
          live_page_url: "http://{{ $labels.instance }}/"
      - alert: InferenceQueueGrowing
        expr: |-
          model:requests_waiting:sum > model:requests_running:sum
          and deriv(model:requests_waiting:sum[15m]) * 900 > 10
        for: 10m
        labels: {severity: warning}
        annotations:
          summary: >-
            {{ $labels.model_name }}: {{ $value }} requests are waiting, more than are running, and the queue grows
            {{- with printf `}}{{"`"}}{{`topk(1, avg_over_time(model:step_limit:ratio_rate5m{cluster=%q,namespace=%q,job=%q,model_name=%q,limit!="none"}[10m]) > 0.1)`}}{{"`"}}{{`
            $labels.cluster $labels.namespace $labels.job $labels.model_name | query }}; limit
            {{ . | first | label "limit" }} {{ . | first | value | humanizePercentage }}{{ end }}
          description: >-
            Requests arrive faster than the engines finish them. TTFT grows with the queue until clients give
            up.
          runbook_url: https://sidestep.example/docs/runbooks/InferenceQueueGrowing.md
          dashboard_url: "https://grafana.example/d/sidestep-why?var-model_name={{ $labels.model_name | urlquery }}"
      # It goes on for a while: a load at the knee is above 1 and below it by turns.
      - alert: InferenceSaturated
        expr: avg_over_time(model:saturation:mean[10m]) >= 1
        for: 5m
        keep_firing_for: 15m
        labels: {severity: warning}
        annotations:
          summary: >-
            {{ $labels.model_name }}: the load is {{ $value | humanizePercentage }} of what its engines can serve
            {{- with printf `}}{{"`"}}{{`topk(1, avg_over_time(model:step_limit:ratio_rate5m{cluster=%q,namespace=%q,job=%q,model_name=%q,limit!="none"}[10m]) > 0.1)`}}{{"`"}}{{`
            $labels.cluster $labels.namespace $labels.job $labels.model_name | query }}; limit
            {{ . | first | label "limit" }} {{ . | first | value | humanizePercentage }}{{ end }}
          description: >-
            Requests arrive as fast as all engines of the model can serve them, or faster. Queues grow until the
            load falls or engines are added.
          runbook_url: https://sidestep.example/docs/runbooks/InferenceSaturated.md
          dashboard_url: "https://grafana.example/d/sidestep-why?var-model_name={{ $labels.model_name | urlquery }}"
      - alert: InferenceKVCachePressure
        expr: |-
          avg_over_time(engine:kv_cache_usage_ratio:max[10m]) > 0.9
          and avg_over_time(engine:preemptions:rate5m[10m]) > 0
        for: 5m
        labels: {severity: warning}
        annotations:
          summary: "{{ $labels.model_name }} on {{ $labels.instance }}: KV cache {{ $value | humanizePercentage }} full and requests are preempted"
          description: >-
            Requests are preempted because the KV cache is full, and are computed again: the work is done twice.
          runbook_url: https://sidestep.example/docs/runbooks/InferenceKVCachePressure.md
          dashboard_url: "https://grafana.example/d/sidestep-kv-cache?var-instance={{ $labels.instance | urlquery }}"
          live_page_url: "http://{{ $labels.instance }}/"
      - alert: InferenceCacheThrashing
        expr: |-
          (
            model:kv_block_lifetime_seconds:mean_rate15m < 60
            and model:kv_block_lifetime_seconds:mean_rate15m
              < 0.1 * avg_over_time(model:kv_block_lifetime_seconds:mean_rate15m[6h] offset 1h)
          )
          and on (cluster, namespace, job, model_name)
          (
            model:prefix_cache_hits:ratio_rate5m
            < 0.5 * avg_over_time(model:prefix_cache_hits:ratio_rate5m[6h] offset 1h)
          )
        for: 15m
        labels: {severity: warning}
        annotations:
          summary: "{{ $labels.model_name }}: KV blocks are evicted after {{ $value | humanizeDuration }}, and the prefix-cache hit rate has fallen"
          description: >-
            Cached blocks are evicted before they are used again: lifetimes are a tenth of the usual or less,
            and the hit rate is half of the usual or less.
          runbook_url: https://sidestep.example/docs/runbooks/InferenceCacheThrashing.md
          dashboard_url: "https://grafana.example/d/sidestep-kv-cache?var-model_name={{ $labels.model_name | urlquery }}"
      - alert: InferenceAbortRatioHigh
        expr: |-
          model:requests_aborted:ratio_rate5m > 0.2
          and model:requests_aborted:rate5m * 300 >= 10
        for: 10m
        labels: {severity: warning}
        annotations:
          summary: "{{ $labels.model_name }}: {{ $value | humanizePercentage }} of requests are aborted"
          description: >-
            Clients disconnect before their response is complete: it takes too long, or they reach a limit of
            their own.
          runbook_url: https://sidestep.example/docs/runbooks/InferenceAbortRatioHigh.md
          dashboard_url: "https://grafana.example/d/sidestep-latency?var-model_name={{ $labels.model_name | urlquery }}"
      - alert: InferenceLoadImbalance
        expr: |-
          max by (cluster, namespace, job, instance, pod, model_name, dialect, engine_type) (engine:requests_in_flight:avg15m)
            > 1.5 * avg by (cluster, namespace, job, instance, pod, model_name, dialect, engine_type) (engine:requests_in_flight:avg15m)
          and max by (cluster, namespace, job, instance, pod, model_name, dialect, engine_type) (engine:requests_in_flight:avg15m)
            - avg by (cluster, namespace, job, instance, pod, model_name, dialect, engine_type) (engine:requests_in_flight:avg15m) > 4
        for: 15m
        labels: {severity: warning}
        annotations:
          summary: "{{ $labels.model_name }} on {{ $labels.instance }}: one engine has {{ $value | humanize }} requests, 1.5 times the mean or more"
          description: >-
            Data-parallel ranks, or engines behind one exporter, have unequal load: requests wait at the fullest
            engine while others are idle.
          runbook_url: https://sidestep.example/docs/runbooks/InferenceLoadImbalance.md
          dashboard_url: "https://grafana.example/d/sidestep-fleet?var-instance={{ $labels.instance | urlquery }}"
          live_page_url: "http://{{ $labels.instance }}/"
      - alert: InferenceLoadImbalance
        expr: |-
          max by (cluster, namespace, job, model_name, dialect, engine_type) (instance_model:requests_in_flight:avg15m)
            > 1.5 * avg by (cluster, namespace, job, model_name, dialect, engine_type) (instance_model:requests_in_flight:avg15m)
          and max by (cluster, namespace, job, model_name, dialect, engine_type) (instance_model:requests_in_flight:avg15m)
            - avg by (cluster, namespace, job, model_name, dialect, engine_type) (instance_model:requests_in_flight:avg15m) > 4
        for: 15m
        labels: {severity: warning, across: instances}
        annotations:
          summary: "{{ $labels.model_name }}: the engines behind one exporter have {{ $value | humanize }} requests, 1.5 times the mean or more"
          description: >-
            The pods of the model have unequal load: requests wait at the fullest pod while others are idle.
          runbook_url: https://sidestep.example/docs/runbooks/InferenceLoadImbalance.md
          dashboard_url: "https://grafana.example/d/sidestep-fleet?var-model_name={{ $labels.model_name | urlquery }}"

  - name: sidestep-objectives-alerts
    rules:
      # Ten bad requests at least in the long window: one slow request at night is no outage. Of gaps between tokens a
      # single request has hundreds, so these need ten requests, finished or running. 30 is the recording group's
      # interval in seconds.
      - alert: InferenceSLOBurn
        expr: |-
          (
            model:slo_errors:ratio_rate1h > on (slo) group_left () 14.4 * (1 - slo:objective:ratio)
            and model:slo_errors:ratio_rate5m > on (slo) group_left () 14.4 * (1 - slo:objective:ratio)
          )
          and sum_over_time(model:slo_errors:rate5m[1h]) * 30 >= 10
          unless (
            max_over_time(model:slo_errors:rate5m{slo=~"inter_token.*"}[1h])
            unless on (cluster, namespace, job, model_name) (
              sum_over_time(model:requests:rate5m[1h]) * 30 >= 10
              or max_over_time(model:requests_running:sum[1h]) >= 10
            )
          )
          unless model:slo_replaced:rate5m
        for: 2m
        labels: {severity: critical, long: 1h, short: 5m}
        annotations:
          summary: >-
            {{ or $labels.model_name $labels.job }}: {{ $value | humanizePercentage }} miss the objective {{ $labels.slo }}, over 1h
            {{- with printf `}}{{"`"}}{{`topk(1, avg_over_time(model:step_limit:ratio_rate5m{cluster=%q,namespace=%q,job=%q,model_name=%q,limit!="none"}[1h]) > 0.1)`}}{{"`"}}{{`
            $labels.cluster $labels.namespace $labels.job $labels.model_name | query }}; limit
            {{ . | first | label "limit" }} {{ . | first | value | humanizePercentage }}{{ end }}
          description: >-
            The error budget of 30 days is being spent 14.4 times too fast over 1h and over 5m.
          runbook_url: https://sidestep.example/docs/runbooks/InferenceSLOBurn.md
          dashboard_url: 'https://grafana.example/d/sidestep-why?var-model_name={{ or $labels.model_name "$__all" | urlquery }}'
      - alert: InferenceSLOBurn
        expr: |-
          (
            model:slo_errors:ratio_rate6h > on (slo) group_left () 6 * (1 - slo:objective:ratio)
            and model:slo_errors:ratio_rate30m > on (slo) group_left () 6 * (1 - slo:objective:ratio)
          )
          and sum_over_time(model:slo_errors:rate5m[6h]) * 30 >= 10
          unless (
            max_over_time(model:slo_errors:rate5m{slo=~"inter_token.*"}[6h])
            unless on (cluster, namespace, job, model_name) (
              sum_over_time(model:requests:rate5m[6h]) * 30 >= 10
              or max_over_time(model:requests_running:sum[6h]) >= 10
            )
          )
          unless model:slo_replaced:rate5m
        for: 15m
        labels: {severity: critical, long: 6h, short: 30m}
        annotations:
          summary: >-
            {{ or $labels.model_name $labels.job }}: {{ $value | humanizePercentage }} miss the objective {{ $labels.slo }}, over 6h
            {{- with printf `}}{{"`"}}{{`topk(1, avg_over_time(model:step_limit:ratio_rate5m{cluster=%q,namespace=%q,job=%q,model_name=%q,limit!="none"}[6h]) > 0.1)`}}{{"`"}}{{`
            $labels.cluster $labels.namespace $labels.job $labels.model_name | query }}; limit
            {{ . | first | label "limit" }} {{ . | first | value | humanizePercentage }}{{ end }}
          description: >-
            The error budget of 30 days is being spent 6 times too fast over 6h and over 30m.
          runbook_url: https://sidestep.example/docs/runbooks/InferenceSLOBurn.md
          dashboard_url: 'https://grafana.example/d/sidestep-why?var-model_name={{ or $labels.model_name "$__all" | urlquery }}'
      - alert: InferenceSLOBurn
        expr: |-
          (
            model:slo_errors:ratio_rate1d > on (slo) group_left () 3 * (1 - slo:objective:ratio)
            and model:slo_errors:ratio_rate2h > on (slo) group_left () 3 * (1 - slo:objective:ratio)
          )
          and sum_over_time(model:slo_errors:rate5m[1d]) * 30 >= 10
          unless (
            max_over_time(model:slo_errors:rate5m{slo=~"inter_token.*"}[1d])
            unless on (cluster, namespace, job, model_name) (
              sum_over_time(model:requests:rate5m[1d]) * 30 >= 10
              or max_over_time(model:requests_running:sum[1d]) >= 10
            )
          )
          unless model:slo_replaced:rate5m
        for: 1h
        labels: {severity: warning, long: 1d, short: 2h}
        annotations:
          summary: >-
            {{ or $labels.model_name $labels.job }}: {{ $value | humanizePercentage }} miss the objective {{ $labels.slo }}, over 1d
            {{- with printf `}}{{"`"}}{{`topk(1, avg_over_time(model:step_limit:ratio_rate5m{cluster=%q,namespace=%q,job=%q,model_name=%q,limit!="none"}[1d]) > 0.1)`}}{{"`"}}{{`
            $labels.cluster $labels.namespace $labels.job $labels.model_name | query }}; limit
            {{ . | first | label "limit" }} {{ . | first | value | humanizePercentage }}{{ end }}
          description: >-
            The error budget of 30 days is being spent 3 times too fast over 1d and over 2h.
          runbook_url: https://sidestep.example/docs/runbooks/InferenceSLOBurn.md
          dashboard_url: 'https://grafana.example/d/sidestep-why?var-model_name={{ or $labels.model_name "$__all" | urlquery }}'
      - alert: InferenceSLOBurn
        expr: |-
          (
            model:slo_errors:ratio_rate3d > on (slo) group_left () 1 * (1 - slo:objective:ratio)
            and model:slo_errors:ratio_rate6h > on (slo) group_left () 1 * (1 - slo:objective:ratio)
          )
          and sum_over_time(model:slo_errors:rate5m[3d]) * 30 >= 10
          unless (
            max_over_time(model:slo_errors:rate5m{slo=~"inter_token.*"}[3d])
            unless on (cluster, namespace, job, model_name) (
              sum_over_time(model:requests:rate5m[3d]) * 30 >= 10
              or max_over_time(model:requests_running:sum[3d]) >= 10
            )
          )
          unless model:slo_replaced:rate5m
        for: 3h
        labels: {severity: warning, long: 3d, short: 6h}
        annotations:
          summary: >-
            {{ or $labels.model_name $labels.job }}: {{ $value | humanizePercentage }} miss the objective {{ $labels.slo }}, over 3d
            {{- with printf `}}{{"`"}}{{`topk(1, avg_over_time(model:step_limit:ratio_rate5m{cluster=%q,namespace=%q,job=%q,model_name=%q,limit!="none"}[3d]) > 0.1)`}}{{"`"}}{{`
            $labels.cluster $labels.namespace $labels.job $labels.model_name | query }}; limit
            {{ . | first | label "limit" }} {{ . | first | value | humanizePercentage }}{{ end }}
          description: >-
            The error budget of 30 days is being spent 1 times too fast over 3d and over 6h.
          runbook_url: https://sidestep.example/docs/runbooks/InferenceSLOBurn.md
          dashboard_url: 'https://grafana.example/d/sidestep-why?var-model_name={{ or $labels.model_name "$__all" | urlquery }}'
      # Neither by a bound in the rules nor by the exporter.
      - alert: InferenceSLOUnmeasured
        expr: |-
          (
            model:generation_tokens:rate5m
              unless on (cluster, namespace, job, model_name, dialect) model:slo_events:rate5m{slo="time_to_first_token"}
              unless on (cluster, namespace, job, model_name) model:slo_events:rate5m{slo=~"ttft|time_to_first_token", dialect=""}
            or
            model:generation_tokens:rate5m
              unless on (cluster, namespace, job, model_name, dialect) model:slo_events:rate5m{slo="request_latency"}
              unless on (cluster, namespace, job, model_name) model:slo_events:rate5m{slo=~"e2e|request_latency", dialect=""}
            or
            sum without (le) (model_le:inter_token_latency_seconds:rate5m{le="+Inf"})
              unless on (cluster, namespace, job, model_name, dialect) model:slo_events:rate5m{slo="inter_token_latency"}
              unless on (cluster, namespace, job, model_name) model:slo_events:rate5m{slo=~"inter_token.*", dialect=""}
          ) > 0
          and on (cluster, namespace, job, model_name) model:requests:rate5m > 0
        for: 30m
        labels: {severity: warning}
        annotations:
          summary: "{{ $labels.model_name }}: requests finish, and a latency objective has no data"
          description: >-
            The threshold of time_to_first_token, inter_token_latency or request_latency is not a bucket bound of
            this engine: its alerts cannot fire.
          runbook_url: https://sidestep.example/docs/runbooks/InferenceSLOUnmeasured.md
          dashboard_url: "https://grafana.example/d/sidestep-latency?var-model_name={{ $labels.model_name | urlquery }}"
      - alert: InferenceSLOUnmeasured
        expr: model:slo_events:rate5m > 0 unless on (slo) slo:objective:ratio
        for: 30m
        labels: {severity: warning, missing: target}
        annotations:
          summary: "{{ $labels.model_name }}: the objective {{ $labels.slo }} has no target"
          description: >-
            The exporter counts the requests that meet it, but no slo:objective:ratio is recorded for it: its
            alerts cannot fire.
          runbook_url: https://sidestep.example/docs/runbooks/InferenceSLOUnmeasured.md
          dashboard_url: "https://grafana.example/d/sidestep-latency?var-model_name={{ $labels.model_name | urlquery }}"

  - name: sidestep-triton-alerts
    rules:
      - alert: TritonServerDown
        expr: |-
          sidestep_triton_state{state="down"} == 1
          and on (cluster, namespace, job, instance)
            (max_over_time(instance:requests:rate5m{dialect="triton"}[30m]) > 0)
        for: 3m
        labels: {severity: critical}
        annotations:
          summary: "{{ $labels.instance }}: a Triton server cannot be reached"
          description: >-
            Polls cannot connect to its port. Requests were served in the last half hour.
          runbook_url: https://sidestep.example/docs/runbooks/TritonServerDown.md
          dashboard_url: "https://grafana.example/d/sidestep-triton?var-instance={{ $labels.instance | urlquery }}"
          live_page_url: "http://{{ $labels.instance }}/"
      - alert: TritonServerDown
        expr: sidestep_triton_state{state="down"} == 1
        for: 3m
        labels: {severity: warning}
        annotations:
          summary: "{{ $labels.instance }}: a Triton server cannot be reached"
          description: >-
            Polls cannot connect to its port.
          runbook_url: https://sidestep.example/docs/runbooks/TritonServerDown.md
          dashboard_url: "https://grafana.example/d/sidestep-triton?var-instance={{ $labels.instance | urlquery }}"
          live_page_url: "http://{{ $labels.instance }}/"
      - alert: TritonServerSlow
        expr: sidestep_triton_state{state="stale"} == 1
        for: 10m
        labels: {severity: warning}
        annotations:
          summary: "{{ $labels.instance }}: a Triton server does not respond to polls in time"
          description: >-
            It takes longer than a second to send its statistics, or its response is invalid. Loading a model
            over HTTP causes this.
          runbook_url: https://sidestep.example/docs/runbooks/TritonServerSlow.md
          dashboard_url: "https://grafana.example/d/sidestep-triton?var-instance={{ $labels.instance | urlquery }}"
          live_page_url: "http://{{ $labels.instance }}/"
      - alert: TritonQueueing
        expr: |-
          model:request_queue_seconds:mean_rate5m{dialect="triton"} > 0.1
          and model:request_queue_seconds:mean_rate5m{dialect="triton"}
            > 0.5 * model:request_latency_seconds:mean_rate5m{dialect="triton"}
        for: 10m
        labels: {severity: warning}
        annotations:
          summary: "{{ $labels.model_name }}: requests wait {{ $value | humanizeDuration }} in Triton's queue, most of their time"
          description: >-
            Requests spend more time in the queue than in computation: all instances of the model are busy.
          runbook_url: https://sidestep.example/docs/runbooks/TritonQueueing.md
          dashboard_url: "https://grafana.example/d/sidestep-triton?var-model={{ $labels.model_name | urlquery }}"

  - name: sidestep-alerts
    rules:
      - alert: SidestepDown
        expr: instance:up:max == 0
        for: 3m
        labels: {severity: warning}
        annotations:
          summary: "The exporter {{ $labels.instance }} cannot be scraped"
          description: >-
            Metrics of its engines are missing. The engines keep serving; their plugins hold or fold records
            until the exporter is back.
          runbook_url: https://sidestep.example/docs/runbooks/SidestepDown.md
          dashboard_url: "https://grafana.example/d/sidestep-sidestep?var-instance={{ $labels.instance | urlquery }}"
      - alert: SidestepMostlyDown
        expr: |-
          avg by (cluster, namespace, job) (instance:up:max) < 0.5
          and count by (cluster, namespace, job) (instance:up:max) >= 3
        for: 3m
        labels: {severity: critical}
        annotations:
          summary: "{{ $labels.job }}: only {{ $value | humanizePercentage }} of exporters can be scraped"
          description: >-
            Metrics of most engines are missing, and no other alert about these engines can fire.
          runbook_url: https://sidestep.example/docs/runbooks/SidestepMostlyDown.md
          dashboard_url: "https://grafana.example/d/sidestep-sidestep?var-job={{ $labels.job | urlquery }}"
      # A counter that begins above 0, or that grew while it was not scraped, has no increase. It is compared with the
      # hour that ended 15 minutes ago: with one moment of it, old counts would fire again after a gap in scrapes.
      - alert: SidestepCountsLost
        expr: |-
          increase(sidestep_lost_items_total[15m]) > 0
          or increase(sidestep_stream_push_dropped_total[15m]) > 0
          or increase(sidestep_subscription_lost_messages_total[15m]) > 0
          or sidestep_lost_items_total > max_over_time(sidestep_lost_items_total[1h] offset 15m)
          or (sidestep_stream_push_dropped_total > 0 unless sidestep_stream_push_dropped_total <= max_over_time(sidestep_stream_push_dropped_total[1h] offset 15m))
          or sidestep_subscription_lost_messages_total > max_over_time(sidestep_subscription_lost_messages_total[1h] offset 15m)
        labels: {severity: warning}
        annotations:
          summary: "{{ $labels.instance }}: {{ $value | humanize }} items are missing from its counters"
          description: >-
            They were dropped or lost by a sender, or missed in an engine's own stream: {{ or $labels.stream
            $labels.subscription }}.
          runbook_url: https://sidestep.example/docs/runbooks/SidestepCountsLost.md
          dashboard_url: "https://grafana.example/d/sidestep-sidestep?var-instance={{ $labels.instance | urlquery }}"
          live_page_url: "http://{{ $labels.instance }}/"
      - alert: SidestepRejecting
        expr: |-
          increase(sidestep_rejected_total[15m]) > 0
          or (sidestep_rejected_total > 0 unless sidestep_rejected_total <= max_over_time(sidestep_rejected_total[1h] offset 15m))
        labels: {severity: warning}
        annotations:
          summary: "{{ $labels.instance }}: messages or items are rejected: {{ $labels.reason }}"
          description: >-
            Rejected items are not counted. The reason bug is sidestep's own fault; all others are the sender's.
          runbook_url: https://sidestep.example/docs/runbooks/SidestepRejecting.md
          dashboard_url: "https://grafana.example/d/sidestep-sidestep?var-instance={{ $labels.instance | urlquery }}"
          live_page_url: "http://{{ $labels.instance }}/"
      - alert: SidestepAdapterErrors
        expr: increase(sidestep_stream_errors_total[15m]) > 0
        labels: {severity: warning}
        annotations:
          summary: "{{ $labels.instance }}: the plugin of {{ $labels.stream }} cannot read its engine's statistics"
          description: >-
            {{ $value | humanize }} records could not be translated in 15 minutes, usually after an upgrade of
            the engine.
          runbook_url: https://sidestep.example/docs/runbooks/SidestepAdapterErrors.md
          dashboard_url: "https://grafana.example/d/sidestep-sidestep?var-instance={{ $labels.instance | urlquery }}"
          live_page_url: "http://{{ $labels.instance }}/"
      - alert: SidestepFolding
        expr: increase(sidestep_folded_items_total[5m]) > 0
        for: 10m
        labels: {severity: warning}
        annotations:
          summary: "{{ $labels.instance }}: {{ $labels.stream }} folds items because its ring is full"
          description: >-
            The sender's ring has been full for ten minutes. Counts are right; gauges and intervals of that time
            are missing.
          runbook_url: https://sidestep.example/docs/runbooks/SidestepFolding.md
          dashboard_url: "https://grafana.example/d/sidestep-sidestep?var-instance={{ $labels.instance | urlquery }}"
          live_page_url: "http://{{ $labels.instance }}/"
      - alert: SidestepLoopLate
        expr: avg_over_time(sidestep_loop_lag_seconds[5m]) > 0.1
        for: 5m
        labels: {severity: warning}
        annotations:
          summary: "{{ $labels.instance }}: the event loop is late by {{ $value | humanizeDuration }}"
          description: >-
            The exporter has too little CPU for its load: pages are late, and so are the values on them.
          runbook_url: https://sidestep.example/docs/runbooks/SidestepLoopLate.md
          dashboard_url: "https://grafana.example/d/sidestep-sidestep?var-instance={{ $labels.instance | urlquery }}"
          live_page_url: "http://{{ $labels.instance }}/"
      - alert: SidestepSeriesLimited
        expr: increase(sidestep_series_limited_total[15m]) > 0
        labels: {severity: warning}
        annotations:
          summary: "{{ $labels.instance }}: the limit {{ $labels.limit }} is reached"
          description: >-
            Updates went to the label value __other__ (label_values), or were rejected, because a limit on
            series was reached.
          runbook_url: https://sidestep.example/docs/runbooks/SidestepSeriesLimited.md
          dashboard_url: "https://grafana.example/d/sidestep-sidestep?var-instance={{ $labels.instance | urlquery }}"
          live_page_url: "http://{{ $labels.instance }}/"
      - alert: SidestepSnapshotUnhealthy
        expr: sidestep_snapshot_healthy == 0
        for: 2m
        labels: {severity: warning}
        annotations:
          summary: "{{ $labels.instance }}: snapshots cannot be written"
          description: >-
            If the exporter ends now, it continues from the last snapshot. Senders hold what they have sent
            since then, and send it again.
          runbook_url: https://sidestep.example/docs/runbooks/SidestepSnapshotUnhealthy.md
          dashboard_url: "https://grafana.example/d/sidestep-sidestep?var-instance={{ $labels.instance | urlquery }}"
          live_page_url: "http://{{ $labels.instance }}/"
      - alert: SidestepSnapshotDamaged
        expr: |-
          sidestep_recovered_total{from="damaged"}
          unless sidestep_recovered_total{from="damaged"}
            <= max_over_time(sidestep_recovered_total{from="damaged"}[1h] offset 1h)
        labels: {severity: warning}
        annotations:
          summary: "{{ $labels.instance }}: its snapshot was damaged, and its counters started at 0"
          description: >-
            The file was set aside as snapshot.damaged in the state directory. To Prometheus this is an ordinary
            counter reset.
          runbook_url: https://sidestep.example/docs/runbooks/SidestepSnapshotDamaged.md
          dashboard_url: "https://grafana.example/d/sidestep-sidestep?var-instance={{ $labels.instance | urlquery }}"
          live_page_url: "http://{{ $labels.instance }}/"
      - alert: SidestepSubscriptionDown
        expr: sidestep_subscription_connected == 0
        for: 5m
        labels: {severity: warning}
        annotations:
          summary: "{{ $labels.instance }}: no connection to {{ $labels.subscription }}"
          description: >-
            The engine's own stream is not read; the metrics that come from it are missing.
          runbook_url: https://sidestep.example/docs/runbooks/SidestepSubscriptionDown.md
          dashboard_url: "https://grafana.example/d/sidestep-sidestep?var-instance={{ $labels.instance | urlquery }}"
          live_page_url: "http://{{ $labels.instance }}/"
      - alert: SidestepScrapeTargetDown
        expr: sidestep_scrape_state{state="down"} == 1 or sidestep_engine_poll_state{state="down"} == 1
        for: 5m
        labels: {severity: warning}
        annotations:
          summary: "{{ $labels.instance }}: {{ $labels.target }} does not answer"
          description: >-
            The families of this target of --scrape, or server of --engine, are missing from the exporter's page.
          runbook_url: https://sidestep.example/docs/runbooks/SidestepScrapeTargetDown.md
          dashboard_url: "https://grafana.example/d/sidestep-sidestep?var-instance={{ $labels.instance | urlquery }}"
          live_page_url: "http://{{ $labels.instance }}/"
      - alert: SidestepKeysUnchecked
        expr: sidestep_zap_up == 0
        for: 1m
        labels: {severity: warning}
        annotations:
          summary: "{{ $labels.instance }}: engines' keys cannot be checked"
          description: >-
            Engines that connect now are rejected. Connected engines are not affected.
          runbook_url: https://sidestep.example/docs/runbooks/SidestepKeysUnchecked.md
          dashboard_url: "https://grafana.example/d/sidestep-sidestep?var-instance={{ $labels.instance | urlquery }}"
          live_page_url: "http://{{ $labels.instance }}/"
      - alert: SidestepWebConfigStale
        expr: sidestep_web_config_current == 0
        for: 5m
        labels: {severity: warning}
        annotations:
          summary: "{{ $labels.instance }}: the web configuration on disk is invalid"
          description: >-
            The last valid configuration stays active: new passwords and certificates have no effect.
          runbook_url: https://sidestep.example/docs/runbooks/SidestepWebConfigStale.md
          dashboard_url: "https://grafana.example/d/sidestep-sidestep?var-instance={{ $labels.instance | urlquery }}"
          live_page_url: "http://{{ $labels.instance }}/"`}}
{{- end -}}
{{- define "sidestep.rules.recording" -}}
{{`# Recording rules: the engines' series added up and divided once, under names that are the same for vLLM, SGLang
# and Triton (`}}{{"`"}}{{`dialect`}}{{"`"}}{{` says which). Names are level:metric:operations:
#
#   engine    one engine: a data-parallel rank, where there are several
#   instance  all engines behind one exporter (a pod, where the exporter is its sidecar)
#   model     all engines of a model, of one namespace and job: what is scraped twice is not added up
#   model_le  likewise, by bucket
#
# Labels that a setup does not have (cluster, namespace, pod) are empty, which is none. Every division is by what is
# above 0: without traffic a ratio has no sample, and no alert can fire on it.
# Ranks of SGLang that work on the same requests report the same values: one of them counts. Of the processes of
# a TensorRT-LLM (pid), which repeat its gauges, the highest does.

groups:
  - name: sidestep-engines
    interval: 30s
    rules:
      - record: engine:requests_running:sum
        expr: vllm:num_requests_running
        labels: {dialect: vllm}
      - record: engine:requests_running:sum
        expr: max without (tp_rank, pp_rank, moe_ep_rank, attn_cp_rank, priority) (sglang:num_running_reqs{priority=""})
        labels: {dialect: sglang}
      - record: engine:requests_running:sum
        expr: llamacpp:requests_processing
        labels: {dialect: llamacpp}
      - record: engine:requests_running:sum
        expr: max without (pid) (trtllm_num_requests_running)
        labels: {dialect: trtllm}
      - record: engine:requests_waiting:sum
        expr: vllm:num_requests_waiting
        labels: {dialect: vllm}
      - record: engine:requests_waiting:sum
        expr: max without (tp_rank, pp_rank, moe_ep_rank, attn_cp_rank, priority) (sglang:num_queue_reqs{priority=""})
        labels: {dialect: sglang}
      - record: engine:requests_waiting:sum
        expr: llamacpp:requests_deferred
        labels: {dialect: llamacpp}
      - record: engine:requests_waiting:sum
        expr: max without (pid) (trtllm_num_requests_waiting)
        labels: {dialect: trtllm}
      - record: engine:requests_in_flight:sum
        expr: engine:requests_running:sum + engine:requests_waiting:sum
      - record: engine:requests_in_flight:avg15m
        expr: avg_over_time(engine:requests_in_flight:sum[15m])
      # 0 to 1, of the fullest pool; cached blocks that no request uses count as free.
      - record: engine:kv_cache_usage_ratio:max
        expr: vllm:kv_cache_usage_perc
        labels: {dialect: vllm}
      - record: engine:kv_cache_usage_ratio:max
        expr: max without (tp_rank, pp_rank, moe_ep_rank, attn_cp_rank) (sglang:token_usage)
        labels: {dialect: sglang}
      - record: engine:kv_cache_usage_ratio:max
        expr: sidestep_llamacpp_context_usage_ratio
        labels: {dialect: llamacpp}
      - record: engine:kv_cache_usage_ratio:max
        expr: max without (pid) (trtllm_kv_cache_utilization)
        labels: {dialect: trtllm}
      - record: engine:preemptions:rate5m
        expr: rate(vllm:num_preemptions_total[5m])
        labels: {dialect: vllm}
      - record: engine:preemptions:rate5m
        expr: max without (tp_rank, pp_rank, moe_ep_rank, attn_cp_rank) (rate(sglang:num_retracted_requests_total[5m]))
        labels: {dialect: sglang}
      # As they are generated: SGLang's sglang:generation_tokens_total moves when a request ends.
      - record: engine:generation_tokens:rate5m
        expr: rate(vllm:generation_tokens_total[5m])
        labels: {dialect: vllm}
      - record: engine:generation_tokens:rate5m
        expr: max without (tp_rank, pp_rank, moe_ep_rank, attn_cp_rank, mode) (rate(sglang:realtime_tokens_total{mode="decode"}[5m]))
        labels: {dialect: sglang}
      # These two count when a request ends.
      - record: engine:generation_tokens:rate5m
        expr: rate(llamacpp:tokens_predicted_total[5m])
        labels: {dialect: llamacpp}
      - record: engine:generation_tokens:rate5m
        expr: rate(trtllm_generation_tokens_total[5m])
        labels: {dialect: trtllm}
      # Prompts once, cached tokens included.
      - record: engine:prompt_tokens:rate5m
        expr: rate(vllm:prompt_tokens_total[5m])
        labels: {dialect: vllm}
      - record: engine:prompt_tokens:rate5m
        expr: sum without (mode) (max without (tp_rank, pp_rank, moe_ep_rank, attn_cp_rank) (rate(sglang:prefill_effective_tokens_total[5m])))
        labels: {dialect: sglang}
      - record: engine:prompt_tokens:rate5m
        expr: rate(llamacpp:prompt_tokens_total[5m]) + rate(llamacpp:prompt_tokens_cached_total[5m])
        labels: {dialect: llamacpp}
      - record: engine:prompt_tokens:rate5m
        expr: rate(trtllm_prompt_tokens_total[5m])
        labels: {dialect: trtllm}
      # Generated ones and computed prompt tokens: 0 while requests run is an engine that does nothing.
      - record: engine:processed_tokens:rate5m
        expr: rate(vllm:iteration_tokens_total_sum[5m])
        labels: {dialect: vllm}
      - record: engine:processed_tokens:rate5m
        expr: sum without (mode) (max without (tp_rank, pp_rank, moe_ep_rank, attn_cp_rank) (rate(sglang:realtime_tokens_total{mode!="prefill_cache"}[5m])))
        labels: {dialect: sglang}
      # Calls of the model, one token each at least; TensorRT-LLM's page has nothing that moves before a request ends.
      - record: engine:processed_tokens:rate5m
        expr: rate(llamacpp:n_decode_total[5m])
        labels: {dialect: llamacpp}
      - record: engine:prefix_cache_queries:rate5m
        expr: rate(vllm:prefix_cache_queries_total[5m])
        labels: {dialect: vllm}
      - record: engine:prefix_cache_queries:rate5m
        expr: engine:prompt_tokens:rate5m{dialect=~"sglang|llamacpp|trtllm"}
      - record: engine:prefix_cache_hits:rate5m
        expr: rate(vllm:prefix_cache_hits_total[5m])
        labels: {dialect: vllm}
      - record: engine:prefix_cache_hits:rate5m
        expr: sum without (mode) (max without (tp_rank, pp_rank, moe_ep_rank, attn_cp_rank) (rate(sglang:prefill_effective_tokens_total{mode=~".+_hit"}[5m])))
        labels: {dialect: sglang}
      - record: engine:prefix_cache_hits:rate5m
        expr: rate(llamacpp:prompt_tokens_cached_total[5m])
        labels: {dialect: llamacpp}
      - record: engine:prefix_cache_hits:rate5m
        expr: rate(trtllm_prompt_cached_tokens_total[5m])
        labels: {dialect: trtllm}
      - record: engine:prefix_cache_hits:ratio_rate5m
        expr: engine:prefix_cache_hits:rate5m / (engine:prefix_cache_queries:rate5m > 0)

  - name: sidestep-instances
    interval: 30s
    rules:
      # Of an exporter that has no engine any more it is 0, not absent.
      - record: instance:sidestep_engine_up:sum
        expr: |-
          sum by (cluster, namespace, job, instance, pod) (sidestep_engine_up)
            or sum by (cluster, namespace, job, instance, pod) (sidestep_engines * 0)
      # Whether an exporter can be scraped: a target that could be once. One that never could, such as a new pod that
      # still downloads its model, has no sample. The hour bridges an outage of Prometheus itself.
      - record: instance:up:max
        expr: |-
          max by (cluster, namespace, job, instance, pod) (
            up
            and on (cluster, namespace, job, instance, pod) (
              sidestep_build_info or last_over_time(instance:up:max[1h])
            )
          )
      - record: instance:requests_running:sum
        expr: sum by (cluster, namespace, job, instance, pod, dialect) (engine:requests_running:sum)
      - record: instance:requests_waiting:sum
        expr: sum by (cluster, namespace, job, instance, pod, dialect) (engine:requests_waiting:sum)
      # SGLang's prefill and decode engines (engine_type) have different loads by design.
      - record: instance_model:requests_in_flight:sum
        expr: sum by (cluster, namespace, job, instance, pod, model_name, dialect, engine_type) (engine:requests_in_flight:sum)
      - record: instance_model:requests_in_flight:avg15m
        expr: avg_over_time(instance_model:requests_in_flight:sum[15m])
      - record: instance:kv_cache_usage_ratio:max
        expr: max by (cluster, namespace, job, instance, pod, dialect) (engine:kv_cache_usage_ratio:max)
      - record: instance:generation_tokens:rate5m
        expr: sum by (cluster, namespace, job, instance, pod, dialect) (engine:generation_tokens:rate5m)
      - record: instance:prompt_tokens:rate5m
        expr: sum by (cluster, namespace, job, instance, pod, dialect) (engine:prompt_tokens:rate5m)
      - record: instance:preemptions:rate5m
        expr: sum by (cluster, namespace, job, instance, pod, dialect) (engine:preemptions:rate5m)
      - record: instance:requests:rate5m
        expr: sum by (cluster, namespace, job, instance, pod) (rate(vllm:request_success_total[5m]))
        labels: {dialect: vllm}
      - record: instance:requests:rate5m
        expr: sum by (cluster, namespace, job, instance, pod) (rate(sglang:num_requests_total[5m]))
        labels: {dialect: sglang}
      - record: instance:requests:rate5m
        expr: sum by (cluster, namespace, job, instance, pod) (rate(trtllm_request_success_total[5m]))
        labels: {dialect: trtllm}
      - record: instance:requests:rate5m
        expr: |-
          sum by (cluster, namespace, job, instance, pod) (
            rate(nv_inference_request_success[5m])
            + rate(sidestep_triton_failed_requests_total[5m])
          )
        labels: {dialect: triton}

  - name: sidestep-models
    interval: 30s
    rules:
      - record: model:sidestep_engine_up:sum
        expr: sum by (cluster, namespace, job, model_name) (sidestep_engine_up{model_name!=""})
      - record: model:requests_running:sum
        expr: sum by (cluster, namespace, job, model_name, dialect) (engine:requests_running:sum)
      - record: model:requests_waiting:sum
        expr: sum by (cluster, namespace, job, model_name, dialect) (engine:requests_waiting:sum)
      # The mean is what an autoscaler acts on: engines of less than a minute count as the others.
      - record: model:saturation:mean
        expr: avg by (cluster, namespace, job, model_name) (sidestep_saturation_ratio)
      # The share of the engines' busy time in which each limit kept requests waiting, or none did.
      - record: model:step_limit:ratio_rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name, limit) (
            max without (tp_rank, pp_rank, moe_ep_rank, attn_cp_rank) (rate(sidestep_step_limit_seconds_total[5m]))
          )
          * on (cluster, namespace, job, model_name) group_left ()
          (
            1 / (
              sum by (cluster, namespace, job, model_name) (
                max without (tp_rank, pp_rank, moe_ep_rank, attn_cp_rank) (rate(sidestep_step_limit_seconds_total[5m]))
              ) > 0
            )
          )
      # The share of each part in the time of requests that ended, and in the time until their first token. The label
      # limit divides the queue.
      - record: model:request_latency_part:ratio_rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name, part, limit) (rate(sidestep_request_part_seconds_total[5m]))
          * on (cluster, namespace, job, model_name) group_left ()
          (1 / (sum by (cluster, namespace, job, model_name) (rate(sidestep_request_part_seconds_total[5m])) > 0))
      - record: model:time_to_first_token_part:ratio_rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name, part, limit) (
            rate(sidestep_request_part_seconds_total{part=~"front_end_in|queue|prefill|prefill_gap"}[5m])
          )
          * on (cluster, namespace, job, model_name) group_left ()
          (
            1 / (
              sum by (cluster, namespace, job, model_name) (
                rate(sidestep_request_part_seconds_total{part=~"front_end_in|queue|prefill|prefill_gap"}[5m])
              ) > 0
            )
          )
      - record: model:kv_cache_usage_ratio:max
        expr: max by (cluster, namespace, job, model_name, dialect) (engine:kv_cache_usage_ratio:max)
      - record: model:kv_cache_usage_ratio:avg
        expr: avg by (cluster, namespace, job, model_name, dialect) (engine:kv_cache_usage_ratio:max)
      - record: model:generation_tokens:rate5m
        expr: sum by (cluster, namespace, job, model_name, dialect) (engine:generation_tokens:rate5m)
      - record: model:prompt_tokens:rate5m
        expr: sum by (cluster, namespace, job, model_name, dialect) (engine:prompt_tokens:rate5m)
      - record: model:preemptions:rate5m
        expr: sum by (cluster, namespace, job, model_name, dialect) (engine:preemptions:rate5m)
      - record: model:prefix_cache_hits:ratio_rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name, dialect) (engine:prefix_cache_hits:rate5m)
          /
          (sum by (cluster, namespace, job, model_name, dialect) (engine:prefix_cache_queries:rate5m) > 0)
      # Finished requests, however they ended; SGLang counts a request with n > 1 as n + 1.
      - record: model:requests:rate5m
        expr: sum by (cluster, namespace, job, model_name) (rate(vllm:request_success_total[5m]))
        labels: {dialect: vllm}
      - record: model:requests:rate5m
        expr: sum by (cluster, namespace, job, model_name) (rate(sglang:num_requests_total[5m]))
        labels: {dialect: sglang}
      - record: model:requests:rate5m
        expr: sum by (cluster, namespace, job, model_name) (rate(trtllm_request_success_total[5m]))
        labels: {dialect: trtllm}
      - record: model:requests:rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name) (
            label_replace(
              rate(nv_inference_request_success[5m]) + rate(sidestep_triton_failed_requests_total[5m]),
              "model_name", "$1", "model", "(.+)"
            )
          )
        labels: {dialect: triton}
      # Each request and token once, also where prefill and decode have engines of their own (pd.md).
      - record: model:service_requests:rate5m
        expr: sum by (cluster, namespace, job, model_name) (rate(sidestep_service_requests_total[5m]))
      - record: model:service_prompt_tokens:rate5m
        expr: sum by (cluster, namespace, job, model_name) (rate(sidestep_service_prompt_tokens_total[5m]))
      - record: model:service_generation_tokens:rate5m
        expr: sum by (cluster, namespace, job, model_name) (rate(sidestep_service_generation_tokens_total[5m]))
      # vLLM reports clients' aborts only if its core is tapped (vllm-core.md).
      - record: model:requests_aborted:rate5m
        expr: sum by (cluster, namespace, job, model_name) (rate(vllm:request_success_total{finished_reason="abort"}[5m]))
        labels: {dialect: vllm}
      - record: model:requests_aborted:rate5m
        expr: sum by (cluster, namespace, job, model_name) (rate(sglang:num_aborted_requests_total[5m]))
        labels: {dialect: sglang}
      - record: model:requests_aborted:ratio_rate5m
        expr: model:requests_aborted:rate5m / (model:requests:rate5m > 0)
      # vLLM's front end, full queue: these never were requests of an engine.
      - record: model:requests_rejected:rate5m
        expr: sum by (cluster, namespace, job, model_name) (rate(vllm:admission_rejections_total[5m]))
        labels: {dialect: vllm}
      # Triton has sums of times, no distributions.
      - record: model:request_latency_seconds:mean_rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name) (
            label_replace(
              rate(nv_inference_request_duration_us[5m]),
              "model_name", "$1", "model", "(.+)"
            )
          )
          / 1e6 /
          (sum by (cluster, namespace, job, model_name) (
            label_replace(
              rate(nv_inference_request_success[5m]),
              "model_name", "$1", "model", "(.+)"
            )
          ) > 0)
        labels: {dialect: triton}
      - record: model:request_queue_seconds:mean_rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name) (
            label_replace(
              rate(nv_inference_queue_duration_us[5m]),
              "model_name", "$1", "model", "(.+)"
            )
          )
          / 1e6 /
          (sum by (cluster, namespace, job, model_name) (
            label_replace(
              rate(nv_inference_request_success[5m]),
              "model_name", "$1", "model", "(.+)"
            )
          ) > 0)
        labels: {dialect: triton}
      # Lifetimes of KV blocks: what the engine hands out again, and what its prefix cache gives up (by its KV events).
      - record: model:kv_block_lifetime_seconds:mean_rate15m
        expr: |-
          sum by (cluster, namespace, job, model_name) (rate(vllm:kv_block_lifetime_seconds_sum[15m]))
          /
          (sum by (cluster, namespace, job, model_name) (rate(vllm:kv_block_lifetime_seconds_count[15m])) > 0)
        labels: {source: allocation}
      - record: model:kv_block_lifetime_seconds:mean_rate15m
        expr: |-
          sum by (cluster, namespace, job, model_name) (rate(sidestep_kv_cached_block_lifetime_seconds_sum[15m]))
          /
          (sum by (cluster, namespace, job, model_name) (rate(sidestep_kv_cached_block_lifetime_seconds_count[15m])) > 0)
        labels: {source: kv_events}

  - name: sidestep-costs
    interval: 30s
    rules:
      # GPUs that dcgm-exporter reports, with the namespace and the pod that use them; GPUs without a pod count together.
      - record: pod:gpu_power_watts:avg5m
        expr: |-
          sum by (cluster, namespace, pod) (
            max by (cluster, namespace, pod, Hostname, gpu) (avg_over_time(DCGM_FI_DEV_POWER_USAGE[5m]))
          )
      - record: pod:gpus:count
        expr: |-
          count by (cluster, namespace, pod) (
            max by (cluster, namespace, pod, Hostname, gpu) (DCGM_FI_DEV_POWER_USAGE)
          )
      # The models of a pod share its GPUs equally; nearly always it has one.
      - record: pod_model:gpu_share:ratio
        expr: |-
          group by (cluster, namespace, job, pod, model_name) (sidestep_engine_up{model_name!=""})
          * on (cluster, namespace, job, pod) group_left ()
          (
            1 / (
              count by (cluster, namespace, job, pod) (
                group by (cluster, namespace, job, pod, model_name) (sidestep_engine_up{model_name!=""})
              ) > 0
            )
          )
      - record: model:gpu_power_watts:avg5m
        expr: |-
          sum by (cluster, namespace, job, model_name) (
            pod_model:gpu_share:ratio * on (cluster, namespace, pod) group_left () pod:gpu_power_watts:avg5m
          )
      - record: model:gpus:count
        expr: |-
          sum by (cluster, namespace, job, model_name) (
            pod_model:gpu_share:ratio * on (cluster, namespace, pod) group_left () pod:gpus:count
          )
      # In the currency of --prices.gpu-hour, each job's own.
      - record: job:gpu_hour_price:max
        expr: max by (cluster, namespace, job) (sidestep_gpu_hour_price)
      - record: model:gpu_cost_per_hour:sum
        expr: model:gpus:count * on (cluster, namespace, job) group_left () job:gpu_hour_price:max
      # In the currency of --prices.model, per second.
      - record: model:token_cost:rate5m
        expr: sum by (cluster, namespace, job, model_name) (rate(sidestep_cost_total[5m]))
      # Prompt tokens once, cached ones included, and generated ones; pages of other exporters have no service's.
      - record: model:tokens:rate5m
        expr: |-
          model:service_prompt_tokens:rate5m + model:service_generation_tokens:rate5m
          or
          sum by (cluster, namespace, job, model_name) (
            model:prompt_tokens:rate5m + model:generation_tokens:rate5m
          )
      - record: model:token_cost_per_1k_tokens:ratio_rate5m
        expr: 1000 * model:token_cost:rate5m / (model:tokens:rate5m > 0)
      - record: model:gpu_cost_per_1k_tokens:ratio_rate5m
        expr: 1000 * model:gpu_cost_per_hour:sum / 3600 / (model:tokens:rate5m > 0)
      - record: model:joules_per_1k_tokens:ratio_rate5m
        expr: 1000 * model:gpu_power_watts:avg5m / (model:tokens:rate5m > 0)

  - name: sidestep-latencies
    interval: 30s
    rules:
      - record: model_le:time_to_first_token_seconds:rate5m
        expr: sum by (cluster, namespace, job, model_name, le) (rate(vllm:time_to_first_token_seconds_bucket[5m]))
        labels: {dialect: vllm}
      - record: model_le:time_to_first_token_seconds:rate5m
        expr: sum by (cluster, namespace, job, model_name, le) (rate(sglang:time_to_first_token_seconds_bucket[5m]))
        labels: {dialect: sglang}
      - record: model_le:time_to_first_token_seconds:rate5m
        expr: sum by (cluster, namespace, job, model_name, le) (rate(trtllm_time_to_first_token_seconds_bucket[5m]))
        labels: {dialect: trtllm}
      - record: model:time_to_first_token_seconds:p50_rate5m
        expr: histogram_quantile(0.5, model_le:time_to_first_token_seconds:rate5m) >= 0
      - record: model:time_to_first_token_seconds:p90_rate5m
        expr: histogram_quantile(0.9, model_le:time_to_first_token_seconds:rate5m) >= 0
      - record: model:time_to_first_token_seconds:p99_rate5m
        expr: histogram_quantile(0.99, model_le:time_to_first_token_seconds:rate5m) >= 0
      - record: model:time_to_first_token_seconds:mean_rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name) (rate(vllm:time_to_first_token_seconds_sum[5m]))
          /
          (sum by (cluster, namespace, job, model_name) (rate(vllm:time_to_first_token_seconds_count[5m])) > 0)
        labels: {dialect: vllm}
      - record: model:time_to_first_token_seconds:mean_rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name) (rate(sglang:time_to_first_token_seconds_sum[5m]))
          /
          (sum by (cluster, namespace, job, model_name) (rate(sglang:time_to_first_token_seconds_count[5m])) > 0)
        labels: {dialect: sglang}
      - record: model:time_to_first_token_seconds:mean_rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name) (rate(trtllm_time_to_first_token_seconds_sum[5m]))
          /
          (sum by (cluster, namespace, job, model_name) (rate(trtllm_time_to_first_token_seconds_count[5m])) > 0)
        labels: {dialect: trtllm}
      - record: model_le:inter_token_latency_seconds:rate5m
        expr: sum by (cluster, namespace, job, model_name, le) (rate(vllm:inter_token_latency_seconds_bucket[5m]))
        labels: {dialect: vllm}
      - record: model_le:inter_token_latency_seconds:rate5m
        expr: sum by (cluster, namespace, job, model_name, le) (rate(sglang:inter_token_latency_seconds_bucket[5m]))
        labels: {dialect: sglang}
      - record: model:inter_token_latency_seconds:p50_rate5m
        expr: histogram_quantile(0.5, model_le:inter_token_latency_seconds:rate5m) >= 0
      - record: model:inter_token_latency_seconds:p90_rate5m
        expr: histogram_quantile(0.9, model_le:inter_token_latency_seconds:rate5m) >= 0
      - record: model:inter_token_latency_seconds:p99_rate5m
        expr: histogram_quantile(0.99, model_le:inter_token_latency_seconds:rate5m) >= 0
      - record: model:inter_token_latency_seconds:mean_rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name) (rate(vllm:inter_token_latency_seconds_sum[5m]))
          /
          (sum by (cluster, namespace, job, model_name) (rate(vllm:inter_token_latency_seconds_count[5m])) > 0)
        labels: {dialect: vllm}
      - record: model:inter_token_latency_seconds:mean_rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name) (rate(sglang:inter_token_latency_seconds_sum[5m]))
          /
          (sum by (cluster, namespace, job, model_name) (rate(sglang:inter_token_latency_seconds_count[5m])) > 0)
        labels: {dialect: sglang}
      - record: model_le:request_latency_seconds:rate5m
        expr: sum by (cluster, namespace, job, model_name, le) (rate(vllm:e2e_request_latency_seconds_bucket[5m]))
        labels: {dialect: vllm}
      - record: model_le:request_latency_seconds:rate5m
        expr: sum by (cluster, namespace, job, model_name, le) (rate(sglang:e2e_request_latency_seconds_bucket[5m]))
        labels: {dialect: sglang}
      - record: model:request_latency_seconds:p50_rate5m
        expr: histogram_quantile(0.5, model_le:request_latency_seconds:rate5m) >= 0
      - record: model:request_latency_seconds:p90_rate5m
        expr: histogram_quantile(0.9, model_le:request_latency_seconds:rate5m) >= 0
      - record: model:request_latency_seconds:p99_rate5m
        expr: histogram_quantile(0.99, model_le:request_latency_seconds:rate5m) >= 0
      - record: model:request_latency_seconds:mean_rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name) (rate(vllm:e2e_request_latency_seconds_sum[5m]))
          /
          (sum by (cluster, namespace, job, model_name) (rate(vllm:e2e_request_latency_seconds_count[5m])) > 0)
        labels: {dialect: vllm}
      - record: model:request_latency_seconds:mean_rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name) (rate(sglang:e2e_request_latency_seconds_sum[5m]))
          /
          (sum by (cluster, namespace, job, model_name) (rate(sglang:e2e_request_latency_seconds_count[5m])) > 0)
        labels: {dialect: sglang}
      - record: model_le:request_queue_seconds:rate5m
        expr: sum by (cluster, namespace, job, model_name, le) (rate(vllm:request_queue_time_seconds_bucket[5m]))
        labels: {dialect: vllm}
      - record: model_le:request_queue_seconds:rate5m
        expr: sum by (cluster, namespace, job, model_name, le) (rate(sglang:queue_time_seconds_bucket[5m]))
        labels: {dialect: sglang}
      - record: model:request_queue_seconds:p50_rate5m
        expr: histogram_quantile(0.5, model_le:request_queue_seconds:rate5m) >= 0
      - record: model:request_queue_seconds:p90_rate5m
        expr: histogram_quantile(0.9, model_le:request_queue_seconds:rate5m) >= 0
      - record: model:request_queue_seconds:p99_rate5m
        expr: histogram_quantile(0.99, model_le:request_queue_seconds:rate5m) >= 0
      - record: model:request_queue_seconds:mean_rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name) (rate(vllm:request_queue_time_seconds_sum[5m]))
          /
          (sum by (cluster, namespace, job, model_name) (rate(vllm:request_queue_time_seconds_count[5m])) > 0)
        labels: {dialect: vllm}
      - record: model:request_queue_seconds:mean_rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name) (rate(sglang:queue_time_seconds_sum[5m]))
          /
          (sum by (cluster, namespace, job, model_name) (rate(sglang:queue_time_seconds_count[5m])) > 0)
        labels: {dialect: sglang}

  - name: sidestep-objectives
    interval: 30s
    rules:
      # The targets, here and nowhere else: the share of requests (of tokens: inter_token_latency) that must be good.
      # No target can be below 0.94: an alert at 14.4 times the budget could never fire.
      - record: slo:objective:ratio
        expr: vector(0.95)
        labels: {slo: time_to_first_token}
      - record: slo:objective:ratio
        expr: vector(0.99)
        labels: {slo: inter_token_latency}
      - record: slo:objective:ratio
        expr: vector(0.99)
        labels: {slo: request_latency}
      - record: slo:objective:ratio
        expr: vector(0.999)
        labels: {slo: availability}
      # Of what the exporter counts itself, with --slo; availability is above. An objective of your own name needs its
      # target here as well.
      - record: slo:objective:ratio
        expr: vector(0.95)
        labels: {slo: ttft}
      - record: slo:objective:ratio
        expr: vector(0.99)
        labels: {slo: inter_token}
      - record: slo:objective:ratio
        expr: vector(0.99)
        labels: {slo: time_per_output_token}
      - record: slo:objective:ratio
        expr: vector(0.99)
        labels: {slo: e2e}
      - record: slo:objective:ratio
        expr: vector(0.95)
        labels: {slo: queue}
      # Any threshold, and one name for all engines, so no label dialect. Each rank of SGLang reports queue times.
      - record: model:slo_errors:rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name, slo) (
            max without (tp_rank, pp_rank, moe_ep_rank, attn_cp_rank) (rate(sidestep_slo_requests_total{result="bad"}[5m]))
          )
      - record: model:slo_events:rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name, slo) (
            max without (tp_rank, pp_rank, moe_ep_rank, attn_cp_rank) (rate(sidestep_slo_requests_total[5m]))
          )
      # Good is at or under the bound in `}}{{"`"}}{{`le`}}{{"`"}}{{`, which has to be one of the engine's: docs/alerting.md. Both spellings, since
      # Prometheus 2 keeps what it reads: "1.0" of text, "1" of protobuf. A series without that bound counts neither way.
      - record: model:slo_errors:rate5m
        expr: |-
          clamp_min(
            sum by (cluster, namespace, job, model_name) (
              rate(vllm:time_to_first_token_seconds_count[5m])
              - sum without (le) (rate(vllm:time_to_first_token_seconds_bucket{le=~"1([.]0)?"}[5m]))
            ),
            0
          )
        labels: {slo: time_to_first_token, dialect: vllm}
      - record: model:slo_events:rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name) (
            rate(vllm:time_to_first_token_seconds_count[5m])
            and sum without (le) (rate(vllm:time_to_first_token_seconds_bucket{le=~"1([.]0)?"}[5m]))
          )
        labels: {slo: time_to_first_token, dialect: vllm}
      - record: model:slo_errors:rate5m
        expr: |-
          clamp_min(
            sum by (cluster, namespace, job, model_name) (
              rate(sglang:time_to_first_token_seconds_count[5m])
              - sum without (le) (rate(sglang:time_to_first_token_seconds_bucket{le=~"1([.]0)?"}[5m]))
            ),
            0
          )
        labels: {slo: time_to_first_token, dialect: sglang}
      - record: model:slo_events:rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name) (
            rate(sglang:time_to_first_token_seconds_count[5m])
            and sum without (le) (rate(sglang:time_to_first_token_seconds_bucket{le=~"1([.]0)?"}[5m]))
          )
        labels: {slo: time_to_first_token, dialect: sglang}
      - record: model:slo_errors:rate5m
        expr: |-
          clamp_min(
            sum by (cluster, namespace, job, model_name) (
              rate(trtllm_time_to_first_token_seconds_count[5m])
              - sum without (le) (rate(trtllm_time_to_first_token_seconds_bucket{le=~"1([.]0)?"}[5m]))
            ),
            0
          )
        labels: {slo: time_to_first_token, dialect: trtllm}
      - record: model:slo_events:rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name) (
            rate(trtllm_time_to_first_token_seconds_count[5m])
            and sum without (le) (rate(trtllm_time_to_first_token_seconds_bucket{le=~"1([.]0)?"}[5m]))
          )
        labels: {slo: time_to_first_token, dialect: trtllm}
      - record: model:slo_errors:rate5m
        expr: |-
          clamp_min(
            sum by (cluster, namespace, job, model_name) (
              rate(vllm:inter_token_latency_seconds_count[5m])
              - sum without (le) (rate(vllm:inter_token_latency_seconds_bucket{le="0.1"}[5m]))
            ),
            0
          )
        labels: {slo: inter_token_latency, dialect: vllm}
      - record: model:slo_events:rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name) (
            rate(vllm:inter_token_latency_seconds_count[5m])
            and sum without (le) (rate(vllm:inter_token_latency_seconds_bucket{le="0.1"}[5m]))
          )
        labels: {slo: inter_token_latency, dialect: vllm}
      - record: model:slo_errors:rate5m
        expr: |-
          clamp_min(
            sum by (cluster, namespace, job, model_name) (
              rate(sglang:inter_token_latency_seconds_count[5m])
              - sum without (le) (rate(sglang:inter_token_latency_seconds_bucket{le="0.1"}[5m]))
            ),
            0
          )
        labels: {slo: inter_token_latency, dialect: sglang}
      - record: model:slo_events:rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name) (
            rate(sglang:inter_token_latency_seconds_count[5m])
            and sum without (le) (rate(sglang:inter_token_latency_seconds_bucket{le="0.1"}[5m]))
          )
        labels: {slo: inter_token_latency, dialect: sglang}
      - record: model:slo_errors:rate5m
        expr: |-
          clamp_min(
            sum by (cluster, namespace, job, model_name) (
              rate(vllm:e2e_request_latency_seconds_count[5m])
              - sum without (le) (rate(vllm:e2e_request_latency_seconds_bucket{le=~"60([.]0)?"}[5m]))
            ),
            0
          )
        labels: {slo: request_latency, dialect: vllm}
      - record: model:slo_events:rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name) (
            rate(vllm:e2e_request_latency_seconds_count[5m])
            and sum without (le) (rate(vllm:e2e_request_latency_seconds_bucket{le=~"60([.]0)?"}[5m]))
          )
        labels: {slo: request_latency, dialect: vllm}
      - record: model:slo_errors:rate5m
        expr: |-
          clamp_min(
            sum by (cluster, namespace, job, model_name) (
              rate(sglang:e2e_request_latency_seconds_count[5m])
              - sum without (le) (rate(sglang:e2e_request_latency_seconds_bucket{le=~"60([.]0)?"}[5m]))
            ),
            0
          )
        labels: {slo: request_latency, dialect: sglang}
      - record: model:slo_events:rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name) (
            rate(sglang:e2e_request_latency_seconds_count[5m])
            and sum without (le) (rate(sglang:e2e_request_latency_seconds_bucket{le=~"60([.]0)?"}[5m]))
          )
        labels: {slo: request_latency, dialect: sglang}
      - record: model:slo_errors:rate5m
        expr: |-
          clamp_min(
            sum by (cluster, namespace, job, model_name) (
              rate(trtllm_e2e_request_latency_seconds_count[5m])
              - sum without (le) (rate(trtllm_e2e_request_latency_seconds_bucket{le=~"60([.]0)?"}[5m]))
            ),
            0
          )
        labels: {slo: request_latency, dialect: trtllm}
      - record: model:slo_events:rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name) (
            rate(trtllm_e2e_request_latency_seconds_count[5m])
            and sum without (le) (rate(trtllm_e2e_request_latency_seconds_bucket{le=~"60([.]0)?"}[5m]))
          )
        labels: {slo: request_latency, dialect: trtllm}
      # vLLM: failed, or rejected because of a full queue. Aborts are the clients'.
      - record: model:slo_errors:rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name) (rate(vllm:request_success_total{finished_reason="error"}[5m]))
          +
          (sum by (cluster, namespace, job, model_name) (rate(vllm:admission_rejections_total[5m])) or sum by (cluster, namespace, job, model_name) (rate(vllm:request_success_total[5m])) * 0)
        labels: {slo: availability, dialect: vllm}
      - record: model:slo_events:rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name) (rate(vllm:request_success_total{finished_reason!="abort"}[5m]))
          +
          (sum by (cluster, namespace, job, model_name) (rate(vllm:admission_rejections_total[5m])) or sum by (cluster, namespace, job, model_name) (rate(vllm:request_success_total[5m])) * 0)
        labels: {slo: availability, dialect: vllm}
      # SGLang: answers with 5xx, of the whole server (they have no model_name); a health check is no request.
      - record: model:slo_errors:rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name) (rate(sglang:http_responses_total{endpoint=~"/generate|/encode|/classify|/v1/.+|/api/.+", method="POST", status_code=~"5.."}[5m]))
          or
          sum by (cluster, namespace, job, model_name) (rate(sglang:http_responses_total{endpoint=~"/generate|/encode|/classify|/v1/.+|/api/.+", method="POST"}[5m])) * 0
        labels: {slo: availability, dialect: sglang}
      - record: model:slo_events:rate5m
        expr: sum by (cluster, namespace, job, model_name) (rate(sglang:http_responses_total{endpoint=~"/generate|/encode|/classify|/v1/.+|/api/.+", method="POST"}[5m]))
        labels: {slo: availability, dialect: sglang}
      # Triton: failures for whatever reason; those of a full queue are in no statistics.
      - record: model:slo_errors:rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name) (
            label_replace(
              rate(sidestep_triton_failed_requests_total[5m]),
              "model_name", "$1", "model", "(.+)"
            )
          )
        labels: {slo: availability, dialect: triton}
      - record: model:slo_events:rate5m
        expr: |-
          sum by (cluster, namespace, job, model_name) (
            label_replace(
              rate(nv_inference_request_success[5m]) + rate(sidestep_triton_failed_requests_total[5m]),
              "model_name", "$1", "model", "(.+)"
            )
          )
        labels: {slo: availability, dialect: triton}
      # Of those, what the exporter counts as well: alerts leave it to the exporter's, or there were two for one objective.
      # Those of the operator's that are called as one of these stand in its place as well. SGLang's answers have no model_name.
      - record: model:slo_replaced:rate5m
        expr: |-
          (
            model:slo_events:rate5m{slo!="availability", dialect!=""}
            and on (cluster, namespace, job, model_name, slo) model:slo_events:rate5m{dialect=""}
          )
          or
          (
            model:slo_events:rate5m{slo="time_to_first_token"}
            and on (cluster, namespace, job, model_name) model:slo_events:rate5m{slo="ttft"}
          )
          or
          (
            model:slo_events:rate5m{slo="inter_token_latency"}
            and on (cluster, namespace, job, model_name) model:slo_events:rate5m{slo="inter_token"}
          )
          or
          (
            model:slo_events:rate5m{slo="request_latency"}
            and on (cluster, namespace, job, model_name) model:slo_events:rate5m{slo="e2e"}
          )
          or
          (
            model:slo_events:rate5m{slo="availability", dialect="vllm"}
            and on (cluster, namespace, job, model_name) model:slo_events:rate5m{slo="availability", dialect=""}
          )
          or
          (
            model:slo_events:rate5m{slo="availability", dialect="sglang"}
            and on (cluster, namespace, job) rate(sidestep_slo_requests_total{slo="availability", engine_type!=""}[5m])
          )
      - record: model:slo_errors:ratio_rate5m
        expr: model:slo_errors:rate5m / (model:slo_events:rate5m > 0)
      # Longer windows are made of the 5 minutes' rates: a few series a model instead of all buckets of all engines.
      - record: model:slo_errors:ratio_rate30m
        expr: |-
          sum_over_time(model:slo_errors:rate5m[30m])
          /
          (sum_over_time(model:slo_events:rate5m[30m]) > 0)
      - record: model:slo_errors:ratio_rate1h
        expr: |-
          sum_over_time(model:slo_errors:rate5m[1h])
          /
          (sum_over_time(model:slo_events:rate5m[1h]) > 0)
      - record: model:slo_errors:ratio_rate2h
        expr: |-
          sum_over_time(model:slo_errors:rate5m[2h])
          /
          (sum_over_time(model:slo_events:rate5m[2h]) > 0)

  - name: sidestep-objectives-long
    interval: 2m
    rules:
      - record: model:slo_errors:ratio_rate6h
        expr: |-
          sum_over_time(model:slo_errors:rate5m[6h])
          /
          (sum_over_time(model:slo_events:rate5m[6h]) > 0)
      - record: model:slo_errors:ratio_rate1d
        expr: |-
          sum_over_time(model:slo_errors:rate5m[1d])
          /
          (sum_over_time(model:slo_events:rate5m[1d]) > 0)
      - record: model:slo_errors:ratio_rate3d
        expr: |-
          sum_over_time(model:slo_errors:rate5m[3d])
          /
          (sum_over_time(model:slo_events:rate5m[3d]) > 0)`}}
{{- end -}}
