"""Codes of what is wrong with queries."""

from __future__ import annotations

from sidestep.diagnosis.finding import Code

# fmt: off
UNREADABLE = Code("SD401", "error", "A dashboard or rule file cannot be read",
    "The file is neither JSON nor YAML, or has no PromQL query: a template of a chart, or a board of another data source.",
    "Give a dashboard as Grafana or Perses exports it, a ConfigMap with it, or a rule file; render charts by `helm template`.")
NOT_PROMQL = Code("SD403", "warning", "A query cannot be read as PromQL",
    "It has an error of syntax, or uses an extension of another time-series database. Its metrics were not checked.",
    "Try it in Prometheus's query page.")
RENAMED = Code("SD405", "error", "A metric has another name",
    "Another release of the engine has this name, or it is written in another way (`vllm_` for `vllm:`, a counter without `_total`). The query never has a result.",
    "Use the name behind the arrow, or run the exporter with `--metrics.legacy`.")
UNKNOWN = Code("SD406", "error", "No release has a metric of this name",
    "It begins like an engine's, but no release that sidestep knows has it.",
    "Look the name up in metrics.md; the nearest is behind the arrow.")
WRONG_LABEL = Code("SD407", "error", "A metric never has a label that the query selects by",
    "The label belongs to other metrics of the engine. The query never has a result.",
    "Remove the matcher, or use the metric that has the label.")
WRONG_VALUE = Code("SD408", "warning", "No series has the value that the query selects by",
    "The label's value is misspelt, of another deployment, or has not occurred yet.",
    "Compare it with the values that the finding names.")
NO_BUCKETS = Code("SD409", "error", "A quantile is computed without buckets",
    "`histogram_quantile` needs the label `le`, which an aggregation removes, or the metric has no buckets. The query never has a result.",
    "Aggregate by `le`, and select the metric that ends in `_bucket`.")
NEEDS_OPTION = Code("SD410", "info", "A metric needs an option",
    "An option of the engine or of the exporter is off.",
    "Turn the option on, or do not use the panel.")
OTHER_ENGINE = Code("SD411", "warning", "A dashboard or rule file is for another engine",
    "No page belongs to the engine that has these metrics. A file for several engines has this finding only if none of them is there.",
    "Use the board of your engine, the names behind the arrows, or those of `--metrics.common`.")
ABSENT = Code("SD412", "info", "A metric is not there",
    "Nothing has been counted yet, what it describes is not in use, or the engine is older.",
    "Wait for what it counts; upgrade the engine if it is older than the release that the finding names.")
OTHER_FORM = Code("SD413", "error", "A histogram has the other form",
    "A classic histogram has series that end in `_bucket`, `_sum` and `_count`, a native one only the family's name. The query uses the other form.",
    "Use the other form, or set `--histograms` of the exporter.")
ELSEWHERE = Code("SD414", "info", "A metric comes from another exporter",
    "No engine has the metric: it comes from another exporter, or from sidestep's.",
    "Scrape the exporter that has it, or remove the panel.")
NEEDS_FLAG = Code("SD415", "info", "A metric needs a flag of the exporter",
    "The name is exposed only with `--metrics.common`, `--slo` or `--tenants.by`.",
    "Run `sidestep serve` with the flag.")
FORMER = Code("SD421", "warning", "A query uses a former name",
    "The engine's present releases do not have it; the exporter has it with `--metrics.legacy`.",
    "Use the name behind the arrow.")
NEEDS_RULE = Code("SD416", "info", "A metric is recorded by a rule that is not there",
    "A name with a colon that does not begin like an engine's is that of a recording rule.",
    "Load the rules in Prometheus (`rule_files`), and give their file by --rules.")
ALWAYS_CONSTANT = Code("SD417", "warning", "A query always has the value of its fallback",
    "Its other part never has a result, as with `or vector(0)`: the panel shows 0 whatever happens.",
    "Mend the first part as the finding says.")
REFUSED_RULES = Code("SD424", "error", "Prometheus refuses the rule file",
    "A field, a duration, a query or a template is wrong, or two groups have one name. Prometheus does not start with such a file, or keeps its former rules.",
    "Correct the field; `promtool check rules FILE` says the same.")
# fmt: on
CODES = tuple(each for each in tuple(vars().values()) if isinstance(each, Code))
