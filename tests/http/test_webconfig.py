"""The web configuration file: accepted files, and one-line errors for all others."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import yaml
from cryptography.hazmat.primitives import serialization
from hypothesis import given
from hypothesis import strategies as st

from fronts import HASH, Authority
from sidestep.errors import ConfigError
from sidestep.http.config_files import MAX_CONFIG_BYTES, WatchedFiles
from sidestep.http.tls import CIPHERS, make_context
from sidestep.http.web_config import HEADERS, RateLimit, WebConfig, load

SECURITY = Path(__file__).parents[2] / "docs" / "security.md"


@pytest.fixture(scope="module")
def directory() -> Path:
    """Return a directory with a server's certificate and key, an authority, and invalid files."""
    made = Path(tempfile.mkdtemp())
    authority = Authority(made)
    authority.server()
    issued = authority.ca.issue_cert("127.0.0.1")
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
    (made / "other-key.pem").write_bytes(issued.private_key_pem.bytes())
    (made / "locked-key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    for issued_name, documented in {
        "server.pem": "tls.crt",
        "server-key.pem": "tls.key",
        "ca.pem": "ca.crt",
    }.items():
        (made / documented).write_bytes((made / issued_name).read_bytes())
    (made / "text.pem").write_text("no certificate\n")
    (made / "empty.pem").write_text("")
    return made


def read(directory: Path, text: str | bytes) -> WebConfig:
    """Return the configuration, once a TLS context could be made from it."""
    file = directory / "web.yml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    config = load(file, WatchedFiles())
    if config.tls is not None:
        make_context(config.tls)
    return config


SERVER = "tls_server_config:\n  cert_file: server.pem\n  key_file: server-key.pem\n"
MUTUAL = f"{SERVER}  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n"

ACCEPTED = {
    "nothing": "",
    "a comment": "# nothing\n",
    "empty sections": "tls_server_config:\nhttp_server_config:\nbasic_auth_users:\n",
    "TLS": SERVER,
    "http2 off": f"{SERVER}http_server_config:\n  http2: false\n",
    "http2 on, in YAML 1.1's words": f"{SERVER}http_server_config:\n  http2: yes\n",
    "client certificates": MUTUAL,
    "client certificates if there are any": MUTUAL.replace("RequireAnd", "").replace(
        "ClientCert\n", "ClientCertIfGiven\n"
    ),
    "no client certificates": f"{SERVER}  client_auth_type: NoClientCert\n",
    "versions": f"{SERVER}  min_version: TLS13\n  max_version: TLS13\n",
    "ciphers": f"{SERVER}  cipher_suites: {list(CIPHERS)}\n",
    "an order of ciphers": f"{SERVER}  prefer_server_cipher_suites: false\n",
    "a curve": f"{SERVER}  curve_preferences: [X25519]\n",
    "an empty list": f"{SERVER}  curve_preferences: []\n  cipher_suites:\n",
    "versions without TLS": "tls_server_config:\n  min_version: TLS12\n",
    "users": f"basic_auth_users:\n  alice: {HASH}\n  1: {HASH}\n  'a:b': {HASH}\n",
    "a hash of htpasswd": "basic_auth_users:\n  a: $2y$10$X0h1gDsPszWURQaxFh.zoubFi6DXncSjhoQNJgRrnGs7EsimhC7zG\n",
    "headers": "http_server_config:\n  headers:\n    X-Frame-Options: deny\n"
    "    Content-Security-Policy: default-src 'self'\n    X-Content-Type-Options: nosniff\n"
    "    Strict-Transport-Security: max-age=31536000\n    X-XSS-Protection: 1; mode=block\n",
    "an alias": f"basic_auth_users:\n  alice: &same {HASH}\n  bob: *same\n",
}
NEWER = {
    "both file and inline": f"{SERVER}  key: ignored\n",
    "names of clients": f"{MUTUAL}  client_allowed_sans: [a.example, 10.0.0.1]\n",
    "no name at all": f"{MUTUAL}  client_allowed_sans: []\n",
    "a rate": "rate_limit: {interval: 1m30.5s, burst: 3}\n",
    "no rate": "rate_limit: {interval: 0, burst: 3}\n",
}
"""Files with keys that Debian's promtool does not know yet."""


@pytest.mark.parametrize("text", [*ACCEPTED.values(), *NEWER.values()], ids=[*ACCEPTED, *NEWER])
def test_accepted_files(directory: Path, text: str) -> None:
    """Files written for other exporters are accepted."""
    read(directory, text)


PROMTOOL = shutil.which("promtool")


def promtool(file: Path) -> str:
    """Return promtool's complaints about ``file``."""
    done = subprocess.run(
        [str(PROMTOOL), "check", "web-config", file], capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr if done.returncode else ""


EXAMPLES = re.findall(r"```yaml\n(.*?)```", SECURITY.read_text(), re.DOTALL)


@pytest.mark.parametrize("text", EXAMPLES)
def test_examples_in_the_documents(directory: Path, text: str) -> None:
    """The documents' examples are valid, also for promtool unless a key is newer than it."""
    file = directory / "web.yml"
    read(directory, text)
    older = "\n".join(
        line
        for line in text.splitlines()
        if not re.match(r"rate_limit|  (interval|burst|client_allowed_sans)|    - ", line)
    )
    file.write_text(older)

    assert PROMTOOL is None or promtool(file) == ""


def expanded(line: str) -> str:
    """Expand ``{}`` to a certificate and its key, ``{c}`` and ``{k}`` to one of them."""
    line = line.replace("{}", "{c}, {k}")
    return line.replace("{c}", "cert_file: server.pem").replace("{k}", "key_file: server-key.pem")


TLS_REFUSED = {
    "cert_file: server.pem": "web.yml: tls_server_config has no key_file",
    "{k}, cert_file: gone.pem": "gone.pem: No such file or directory",
    "{k}, cert_file: /dev/zero": "it is not a file",
    "{k}, cert_file: [a]": "web.yml: tls_server_config.cert_file: Expected `str",
    "{k}, cert_file: text.pem": "are not a PEM certificate and its PEM key",
    "{c}, key_file: other-key.pem": "do not belong together",
    "{c}, key_file: locked-key.pem": "the key is encrypted",
    "cert: nonsense, key: nonsense": "tls_server_config.cert and",
    "{}, client_auth_type: RequestClientCert": "RequestClientCert is not supported",
    "{}, client_auth_type: RequireClientCert": "use RequireAndVerifyClientCert",
    "{}, client_auth_type: Maybe": "'Maybe' must be one of NoClientCert, VerifyClientCertIfGiven",
    "{}, client_auth_type: VerifyClientCertIfGiven": "needs client_ca_file",
    "{}, client_ca_file: ca.pem": "tls_server_config.client_ca_file needs client_auth_type",
    "{}, client_ca_file: gone.pem": "gone.pem: No such file or directory",
    "{}, client_ca_file: text.pem, client_auth_type: VerifyClientCertIfGiven": "has no PEM certif",
    "{}, client_allowed_sans: [a]": "client_allowed_sans needs client_auth_type",
    "{}, min_version: TLS14": "'TLS14' must be one of TLS12, TLS13",
    "{}, min_version: TLS13, max_version: TLS12": "leaves no version",
    "{}, cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]": "'TLS_RSA_WITH_RC4_128_SHA' is no secure",
    "{}, max_version: TLS12, cipher_suites: [TLS_AES_128_GCM_SHA256]": "has none for TLS12",
    "{}, curve_preferences: [Curve1]": "tls_server_config.curve_preferences 'Curve1' must be one of",
    "{}, curve_preferences: [X25519, CurveP256]": "curve_preferences can be one curve here",
    "{}, prefer_server_cipher_suites: maybe": "server_cipher_suites: Expected `bool",
    "{}, ca_file: x": "tls_server_config: Object contains unknown field `ca_file`",
    '{k}, cert_file: "a\\0b"': "line 1: is not YAML: it has an invalid character",
    '{k}, cert_file: "\\ud800"': "line 1: is not YAML: it has an invalid character",
    "{}, cert_file: server.pem": "line 1: is not YAML: cert_file is a duplicate key",
}
REFUSED = {
    **{"tls_server_config: {" + expanded(line) + "}": why for line, why in TLS_REFUSED.items()},
    "tls_config: {}": "the file: Object contains unknown field `tls_config`",
    "tls_server_config: [1]": "web.yml: tls_server_config: Expected `object",
    "text": "the file: Expected `object`, got `str`",
    "[a]: b": "line 1: is not YAML: found unhashable key",
    "http_server_config: {http2: maybe}": "http_server_config.http2: Expected `bool",
    "http_server_config: {headers: {Server: x}}": "headers.Server must be one of Content-Security-Policy,",
    "http_server_config: {headers: {X-Frame-Options: maybe}}": "must be deny or sameorigin",
    "http_server_config: {headers: {X-Content-Type-Options: sniff}}": "must be nosniff",
    'http_server_config: {headers: {X-XSS-Protection: "1\\r\\nA: b"}}': "one line of plain",
    "http_server_config: {headers: {X-XSS-Protection: ü}}": "one line of plain characters",
    "basic_auth_users: [alice]": "basic_auth_users: Expected `object",
    "basic_auth_users: {alice: secret}": "basic_auth_users.alice is not a bcrypt hash",
    f"basic_auth_users: {{alice: {HASH[:-1]}}}": "is not a bcrypt hash",
    f"basic_auth_users: {{alice: {HASH}, alice: {HASH}}}": "alice is a duplicate key",
    f"basic_auth_users: {{alice: {HASH.replace('$04$', '$03$')}}}": "is not a bcrypt hash",
    f"basic_auth_users: {{alice: {HASH.replace('$04$', '$31$')}}}": "has a cost of 31, 18 at most",
    "rate_limit: {interval: 1, burst: 1}": "rate_limit.interval must be a duration with its unit",
    "rate_limit: {interval: 4ns, burst: 1}": "must be a duration",
    "rate_limit: {interval: ١s, burst: 1}": "must be a duration",  # noqa: RUF001
    "rate_limit: {interval: 1s}": "rate_limit needs a burst of at least 1",
    "rate_limit: {interval: 1s, burst: -1}": "rate_limit.burst must be a whole number",
    "rate_limit: {rate: 1}": "rate_limit: Object contains unknown field `rate`",
    "tls_server_config: {cert_file: !!str a}": "line 1: is not YAML: it has a tag",
    "basic_auth_users: {true: x}": "basic_auth_users: Expected `str`, got `bool`",
    "a: [": "line 1: is not YAML",
    "[" * 5000: "line 1: is not YAML: it has too many nodes, aliases or levels",
    '"\\UFFFFFFFF": 1': "is not YAML",
    "a: 1\n\tb: 2": "is not YAML",
}


@pytest.mark.parametrize(("text", "why"), REFUSED.items(), ids=range(len(REFUSED)))
def test_rejected_files(directory: Path, text: str, why: str) -> None:
    """The error is one line that begins with the file and names the key and the remedy."""
    with pytest.raises(ConfigError) as refused:
        read(directory, text)

    assert why in str(refused.value)
    assert str(directory) in str(refused.value) or "/dev/zero" in str(refused.value)
    assert "Traceback" not in str(refused.value)


def test_files_that_cannot_be_read(directory: Path) -> None:
    """Missing, directory, binary, too long and impossible names give an error."""
    for path, why in {
        directory / "gone.yml": "No such file",
        directory: "it is not a file",
        Path("\0"): "null byte",
        Path("x" * 300): "too long",
    }.items():
        with pytest.raises(ConfigError, match=why):
            load(path, WatchedFiles())
    for content, why in {b"\xff": "not UTF-8", b"#" * (MAX_CONFIG_BYTES + 1): "more than"}.items():
        with pytest.raises(ConfigError, match=why):
            read(directory, content)


def test_certificates_inline(directory: Path) -> None:
    """Certificates can be block texts; no repr shows secrets."""
    document = {
        "tls_server_config": {
            "cert": (directory / "server.pem").read_text(),
            "key": (directory / "server-key.pem").read_text(),
            "client_ca": (directory / "ca.pem").read_text(),
            "client_auth_type": "RequireAndVerifyClientCert",
        },
        "basic_auth_users": {"alice": HASH},
    }
    config = read(directory, yaml.safe_dump(document))

    assert config.tls is not None
    assert "PRIVATE" not in repr(config)
    assert "$2b$" not in repr(config)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1s", 1), ("1.5h", 5400), ("1h15m30.5s", 4530.5), ("100ms", 0.1), ("+1m", 60),
        ("1.s", 1),
    ],
)  # fmt: skip
def test_durations_have_gos_form(directory: Path, text: str, seconds: float) -> None:
    """Units from milliseconds to hours work, added up."""
    config = read(directory, f"rate_limit: {{interval: {text}, burst: 2}}")

    assert config.rate_limit == RateLimit(seconds, 2)


KEYS = [
    "tls_server_config", "http_server_config", "basic_auth_users", "rate_limit", "cert_file",
    "key_file", "client_auth_type", "client_allowed_sans", "min_version", "cipher_suites",
    "curve_preferences", "headers", "http2", "interval", "burst", *HEADERS,
]  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(KEYS)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)
SYNTAX = st.text(
    st.sampled_from("abk:-[]{}&*!|>%@`'\"#?,\\ \n\tuUx0$12<=~._é\x00\x85\ufeff\U0001f600")
)


@given(st.text() | SYNTAX | st.binary() | TREES.map(yaml.safe_dump))
def test_any_file_is_accepted_or_rejected(content: str | bytes) -> None:
    """No text, bytes or tree of known keys raises anything but ConfigError."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "web.yml"
        text = content.encode("utf-8", "replace") if isinstance(content, str) else content
        file.write_bytes(text)
        try:
            load(file, WatchedFiles())
        except ConfigError as error:
            assert str(error)  # noqa: PT017 - the file may also be valid
