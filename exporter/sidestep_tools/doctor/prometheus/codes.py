"""Codes of what is wrong with a Prometheus server."""

from __future__ import annotations

from sidestep.diagnosis.finding import Code

# fmt: off
NO_ANSWER = Code("SD301", "error", "Prometheus does not answer",
    "Nothing listens at the address, access is denied, or it is no Prometheus.",
    "Give the address of Prometheus's own page, with its path prefix if it has one; --user and --header as to curl.")
NOT_SCRAPED = Code("SD302", "error", "No exporter is scraped",
    "Prometheus has no series of a sidestep exporter: no job has its address, or a PodMonitor or ServiceMonitor does not select it.",
    "Add a job for the exporter's port, see deploy/prometheus.yml; in Kubernetes, run `sidestep doctor --manifest`.")
DOWN = Code("SD303", "error", "A target is down",
    "Prometheus cannot scrape an exporter or an engine; the text is Prometheus's own.",
    "Mend what the error names: a refused connection is a wrong port or a process that has ended; a deadline needs a longer scrape_timeout; 401 needs basic_auth.")
DOUBLED = Code("SD304", "error", "One job scrapes the same engines twice",
    "Both pages have the same counters under one `job`, so that every sum is twice what it should be.",
    "Scrape one of the two: the exporter's /metrics.")
TWO_JOBS = Code("SD305", "warning", "Two jobs scrape the same engines",
    "Sums that do not select a `job` are twice what they should be, as on most boards of engines.",
    "Scrape one of the two, or select the job in every query.")
WINDOW = Code("SD306", "warning", "A rule's window is too short for the scrape interval",
    "A rate needs two samples in its window; with less than two intervals it has gaps or no result.",
    "Scrape more often, or make the window at least twice the interval; four times is usual.")
NO_RULES = Code("SD308", "info", "No rule reads the metrics of engines",
    "Neither sidestep's recording rules and alerts nor others are loaded; boards that query recorded names are empty.",
    "Load deploy/rules/*.yaml by `rule_files`; see alerting.md.")
RULE_FAILS = Code("SD309", "error", "A rule cannot be evaluated",
    "Prometheus reports an error for the rule; it records nothing, and its alert never fires.",
    "Mend what the error names; two sources of one series are the usual cause.")
NOT_RECORDED = Code("SD310", "error", "A rule reads what no rule records",
    "The rule that records the name is not loaded, so this one never has a result.",
    "Load recording.yaml, too, in the same Prometheus.")
EXPORTED = Code("SD311", "warning", "Labels of the page clash with those of the target",
    "Prometheus renames a label of the page to `exported_...` if the target has it, too; queries that select or group by it then see the target's.",
    "Set `honor_labels: true` in the job, or remove the label from the target by relabel_configs.")
CLOCK = Code("SD312", "warning", "Clocks differ",
    "Ages and the times of restarts are computed from two clocks.",
    "Synchronise the hosts by NTP.")
# fmt: on
CODES = tuple(each for each in tuple(vars().values()) if isinstance(each, Code))
