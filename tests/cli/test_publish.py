"""`specdec publish` against an HTTP endpoint that answers as the Hub does, through huggingface_hub's own client."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub import HfApi, constants
from safetensors.torch import load_file

import hf_specdec.hub.publish as publishing
from hf_specdec.networks import AutoDrafter
from tests.cli.test_card import carded, folder, measured  # noqa: F401 (fixtures)
from tests.networks import drafter_for, small_target


TOKEN = "hf_of_a_test"


# httpx, of which huggingface_hub's basic upload still asks the old way
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")


class Handler(BaseHTTPRequestHandler):
    """Notes a request and answers it, or refuses it."""

    def answer(self):
        hub, path, body = self.server.hub, self.path.partition("?")[0], self.body()
        hub.requests.append((path, body))
        refusal = next((each for end, each in hub.refusals.items() if path.endswith(end)), None)
        if refusal is not None:
            self.reply(refusal[0], {"error": refusal[1]}, {"X-Error-Message": refusal[1]})
        elif not path.startswith("/storage") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.reply(401, {"error": "Invalid username or password."})
        else:
            self.reply(200, hub.respond(path, body))

    def body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def reply(self, status, values, headers=()):
        content = json.dumps(values).encode()
        self.send_response(status)
        for name, value in {**dict(headers), "Content-Type": "application/json"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *words):
        """Tests are silent."""

    def do_HEAD(self):
        """No repository here holds a file yet."""
        self.reply(404, {}, {"X-Error-Code": "EntryNotFound"})


Handler.do_POST = Handler.do_PUT = Handler.answer


class Hub:
    """What the endpoint was asked, and what it answers where it refuses."""

    def __init__(self):
        self.refusals = {}  # end of a path: (status, message)
        self.requests, self.large, self.commits = [], {}, []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.hub, self.url = self, f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def close(self):
        if self.thread.is_alive():
            self.server.shutdown()
            self.server.server_close()
            self.thread.join()

    def respond(self, path, body):
        if path.startswith("/storage/"):
            self.large[path.rpartition("/")[2]] = body
            return {}
        if path.endswith("/commit/main"):
            return self.commit([json.loads(line) for line in body.splitlines()])
        values = json.loads(body)
        if path.endswith("/api/repos/create"):
            return {"url": f"{self.url}/{values['organization']}/{values['name']}"}
        if path.endswith("/api/validate-yaml"):
            return {"errors": [], "warnings": []}
        if path.endswith("/preupload/main"):
            modes = [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if each["path"].endswith("safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for each in values["files"]
            ]
            return {"files": modes}
        assert path.endswith("/info/lfs/objects/batch"), path
        upload = [
            {**each, "actions": {"upload": {"href": f"{self.url}/storage/{each['oid']}", "header": {}}}}
            for each in values["objects"]
        ]
        return {"transfer": "basic", "objects": upload}

    def commit(self, lines):
        files = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.large[value["oid"]]
        self.commits.append(files)
        return {"success": True, "commitOid": "c0ffee", "commitUrl": f"{self.url}/org/drafter/commit/c0ffee"}


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(publishing, "HfApi", lambda: HfApi(endpoint=hub.url, token=TOKEN))
    yield hub
    hub.close()


def created(hub):
    [body] = [json.loads(body) for path, body in hub.requests if path.endswith("/api/repos/create")]
    return body


def is_private(body):
    """Releases of the client say it in either way."""
    return body.get("private") is True or body.get("visibility") == "private"


def test_everything_arrives_in_one_commit(carded, hub, run):  # noqa: F811
    result = run("publish", carded, "--repo", "org/drafter")
    assert f"{hub.url}/org/drafter/commit/c0ffee" in result.stderr
    [files] = hub.commits
    assert sorted(files) == result.stdout.split()
    for name, content in files.items():
        assert content == (carded / name).read_bytes(), name
    weights = (carded / "model.safetensors").read_bytes()
    assert list(hub.large) == [hashlib.sha256(weights).hexdigest()]
    body = created(hub)
    assert (body["organization"], body["name"]) == ("org", "drafter")
    assert not is_private(body)


@pytest.mark.parametrize("kind", ["eagle", "eagle3-reduced"])
def test_networks_push_themselves(kind, hub, monkeypatch, tmp_path):
    """Through transformers, whose card is all there is beside weights and config."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", hub.url)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)  # a client that newer releases keep
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    )
    target = small_target()
    network = drafter_for(target, kind)
    network.push_to_hub("org/drafter", private=True, token=TOKEN)
    assert is_private(created(hub))
    [files] = hub.commits
    assert sorted(files) == ["README.md", "config.json", "model.safetensors"]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    loaded = AutoDrafter.from_pretrained(tmp_path, target=target)
    expected = network.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    assert not [name for name in load_file(tmp_path / "model.safetensors") if "embed_tokens" in name]


def test_a_private_repository(carded, hub, run):  # noqa: F811
    run("publish", carded, "--repo", "org/drafter", "--private")
    assert is_private(created(hub))


def test_a_dry_run_asks_nothing(carded, hub, run):  # noqa: F811
    run("publish", carded, "--repo", "org/drafter", "--dry-run")
    assert hub.requests == []


@pytest.mark.parametrize(
    ("end", "status", "said", "hint"),
    [
        ("/api/repos/create", 401, "Invalid username or password.", "hf auth login"),
        ("/api/repos/create", 403, "You have no rights in org", "may not write to org/drafter"),
        ("/preupload/main", 404, "Repository not found", "may not write to org/drafter"),
        ("/commit/main", 413, "Too large", "Nothing was committed"),
        ("/commit/main", 403, "Storage is full", "Storage is full"),
        ("/api/repos/create", 500, "Oops", "look at org/drafter"),
    ],
)
def test_refusals_are_readable(end, status, said, hint, carded, hub, run):  # noqa: F811
    hub.refusals[end] = (status, said)
    error = run("publish", carded, "--repo", "org/drafter", code=2).stderr
    assert error.splitlines()[-1].partition("Error: ")[2]
    error = error.splitlines()[-1]  # above it are the client's progress bars
    assert str(status) in error
    assert hint in error
    assert ("Nothing was committed" in error) == (status < 500)
    assert TOKEN not in error
    assert hub.commits == []


def test_an_endpoint_that_does_not_answer(carded, hub, run, monkeypatch):  # noqa: F811
    hub.close()
    monkeypatch.setattr(huggingface_hub.utils._http.time, "sleep", lambda _: None)
    error = run("publish", carded, "--repo", "org/drafter", code=2).stderr
    assert error.startswith("Error: ")
    assert "look at org/drafter before you try again" in error


def test_a_card_that_the_hub_calls_invalid(carded, hub, run):  # noqa: F811
    hub.refusals["/api/validate-yaml"] = (400, "license must be one of ...")
    error = run("publish", carded, "--repo", "org/drafter", code=2).stderr
    assert error.startswith("Error: ")
    assert "Invalid metadata in README.md" in error
    assert hub.commits == []


# --- links ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "custom_generate/generate.py", "vocab.txt"])
def test_links_that_leave_the_folder_are_refused(name, carded, hub, run, tmp_path):  # noqa: F811
    secret = tmp_path / "secret"
    secret.write_bytes((carded / "model.safetensors").read_bytes())
    link = carded / name
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(secret)
    error = run("publish", carded, "--repo", "org/drafter", code=2).stderr
    assert name in error
    assert "leaves the folder" in error
    assert hub.requests == []


def test_linked_folders_are_left_out(carded, hub, run, tmp_path):  # noqa: F811
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "generate.py").write_text("secret")
    (carded / "custom_generate").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    listed = run("publish", carded, "--repo", "org/drafter", "--dry-run")
    assert "custom_generate/generate.py" not in listed.stdout.split()


def test_links_within_the_folder_are_followed(carded, hub, run):  # noqa: F811
    (carded / "model.safetensors").rename(carded / "weights")
    (carded / "model.safetensors").symlink_to(Path("weights"))
    run("publish", carded, "--repo", "org/drafter")
    [files] = hub.commits
    assert files["model.safetensors"] == (carded / "weights").read_bytes()
