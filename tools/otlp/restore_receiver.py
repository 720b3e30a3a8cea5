"""Put the receiver of OTLP back into Debian's source of Prometheus: restore_receiver.py TREE ORIGINAL.

Debian leaves it out, since it has not packaged all of its libraries. Only the conversion of deltas needs
those libraries, and stays out here too.
"""

import re
import shutil
import sys
from pathlib import Path

TREE, ORIGINAL = map(Path, sys.argv[1:3])
STORAGE = Path("storage/remote")
ATTRIBUTES = {
    "Namespace": "service.namespace",
    "Name": "service.name",
    "InstanceID": "service.instance.id",
}
REPLACED_IMPORTS = (
    '\tconventions "go.opentelemetry.io/collector/semconv/v1.6.1"\n',
    '\t"github.com/prometheus/otlptranslator"\n',
)
LABELS = """package prometheusremotewrite

import "github.com/prometheus/otlptranslator"

func normalizeLabel(name string) string {
	namer := otlptranslator.LabelNamer{UnderscoreLabelSanitization: true, PreserveMultipleUnderscores: true}
	built, err := namer.Build(name)
	if err != nil {
		return name
	}
	return built
}
"""
HANDLER_HEAD = """package remote

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/collector/consumer"
	"go.opentelemetry.io/collector/pdata/pmetric"
	"go.opentelemetry.io/collector/pdata/pmetric/pmetricotlp"

	"github.com/prometheus/prometheus/config"
	"github.com/prometheus/prometheus/prompb"
	"github.com/prometheus/prometheus/storage"
	otlptranslator "github.com/prometheus/prometheus/storage/remote/otlptranslator/prometheusremotewrite"
)

const (
	pbContentType   = "application/x-protobuf"
	jsonContentType = "application/json"
)

"""


NAME = "promName := namer.Build(TranslatorMetricFromOtelMetric(metric))\n"
NAME_OR_ERROR = """promName, err := namer.Build(TranslatorMetricFromOtelMetric(metric))
				if err != nil {
					errs = multierr.Append(errs, err)
					continue
				}
"""
FIELD = "\tremoteWriteHandler http.Handler\n"
ENABLED = "\tif rwEnabled {\n"
HANDLER = """\t\ta.otlpWriteHandler = remote.NewOTLPWriteHandler(
			logger, registerer, ap, configFunc, remote.OTLPOptions{})
"""
ROUTE = '\tr.Post("/write", api.ready(api.remoteWrite))\n'
OTLP_ROUTE = """\tr.Post("/otlp/v1/metrics", api.ready(
		func(w http.ResponseWriter, r *http.Request) { api.otlpWriteHandler.ServeHTTP(w, r) }))
"""
FLAG = '\ta.Flag("web.enable-remote-write-receiver"'
OTLP_FLAG = """\ta.Flag("web.enable-otlp-receiver", "Enable API endpoint accepting OTLP write requests.").
		Default("false").BoolVar(&cfg.web.EnableRemoteWriteReceiver)

"""


def replace(path: Path, *pairs: tuple[str, str]) -> None:
    """Replace the first occurrence of each text.

    Raises:
        SystemExit: A newer source lacks one.
    """
    text = path.read_text()
    for old, new in pairs:
        if old not in text:
            raise SystemExit(f"{path}: no {old!r}")
        text = text.replace(old, new, 1)
    path.write_text(text)


def restore_translator() -> None:
    """Copy the translator, and adapt it to newer libraries than it was written for."""
    to = TREE / STORAGE / "otlptranslator"
    tests = shutil.ignore_patterns("*_test.go")
    shutil.copytree(ORIGINAL / STORAGE / "otlptranslator", to, ignore=tests)
    package = to / "prometheusremotewrite"
    helper = package / "helper.go"
    text = helper.read_text()
    for line in REPLACED_IMPORTS:
        text = text.replace(line, "")
    for name, key in ATTRIBUTES.items():
        text = re.sub(rf"conventions\.AttributeService{name}\b", f'"{key}"', text)
    helper.write_text(text.replace("otlptranslator.NormalizeLabel(", "normalizeLabel("))
    (package / "label.go").write_text(LABELS)
    replace(package / "metrics_to_prw.go", (NAME, NAME_OR_ERROR))


def restore_handler() -> None:
    """Copy the functions that read and handle a request, without the conversion of deltas."""
    codec = (ORIGINAL / STORAGE / "codec.go").read_text()
    decode = codec[codec.index("func DecodeOTLPWriteRequest(") :]
    decode = decode[: decode.index("\n}\n") + 3]
    handler = (ORIGINAL / STORAGE / "write_handler.go").read_text()
    handler = handler[handler.index("type OTLPOptions struct") : handler.index("func hasDelta(")]
    begin, end = handler.index("\tif opts.ConvertDelta {"), handler.index("\treturn wh\n")
    handler = handler[:begin] + handler[end:]
    handler = handler.replace("h.d2cConsumer != nil && hasDelta(md)", "h.d2cConsumer != nil")
    (TREE / STORAGE / "otlp_handler.go").write_text(f"{HANDLER_HEAD}{decode}\n{handler}")


def restore_route() -> None:
    """Add the route, and the flag, which also turns on remote write."""
    replace(
        TREE / "web/api/v1/api.go",
        (FIELD, f"{FIELD}\totlpWriteHandler http.Handler\n"),
        (ENABLED, f"{ENABLED}{HANDLER}"),
        (ROUTE, f"{ROUTE}{OTLP_ROUTE}"),
    )
    replace(TREE / "cmd/prometheus/main.go", (FLAG, f"{OTLP_FLAG}{FLAG}"))


if __name__ == "__main__":
    restore_translator()
    restore_handler()
    restore_route()
    # Service discovery other than by files and HTTP takes most of the time to compile.
    (TREE / "plugins/plugins.go").unlink()
