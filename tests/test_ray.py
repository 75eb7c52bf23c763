"""Files of prompts, and servers, on Ray clusters that the tests start."""

import json
import os
import signal
import socket
import subprocess
from typing import Any

import httpx
import pytest
from answers import SAMPLED, complete, rows, run, settled, started, wait_for_rows

import layerskip
from layerskip.api.loading import encode, load
from layerskip.texts.prompts import Prompt
from layerskip.texts.tokens import decode_text

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Ray must not send statistics or give its workers a lower priority."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")


def test_two_workers_write_the_file_of_one_process_though_the_driver_is_killed(given, tmp_path):
    output, whole = tmp_path / "out", tmp_path / "whole"
    lines = [{"id": f"b{n}", "prompt": f"x = {n}" * (1 + n % 7)} for n in range(40)]
    lines[5]["prompt"] = "x y z " * 5000
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(given, whole, *SAMPLED).exit_code == 1
    process = started(given, output, *SAMPLED, "--ray", "--ray-workers", "2")
    wait_for_rows(process, output, 3)
    process.kill()
    process.communicate()
    kept = complete(output)
    assert 3 <= kept.count(b"\n") < 40
    process = started(given, output, *SAMPLED, "--ray", "--ray-workers", "2")
    _, said = process.communicate()
    assert process.returncode == 1
    first, *_, failed = said.splitlines()
    assert first.endswith("of 40 rows already done")
    assert "Ray: machines 1, models 2," in said
    assert "1 prompt failed" in failed
    assert output.read_bytes().startswith(kept)
    assert settled(output) == settled(whole)


def workers():
    """The processes below this one in which Ray runs models."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True)
    lines = [line.split(maxsplit=2) for line in listed.stdout.splitlines()]
    parents = {int(pid): int(parent) for pid, parent, *_ in lines}

    def below(pid):
        return pid == os.getpid() or (pid in parents and below(parents[pid]))

    named = [int(line[0]) for line in lines if line[-1].startswith("ray::MapWorker")]
    return [pid for pid in named if below(pid)]


@pytest.fixture
def machines():
    """The address of a cluster of two nodes, both on this machine."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=2)
    yield cluster.address
    cluster.shutdown()


def test_each_machine_of_a_cluster_has_a_worker(given, tmp_path, machines, monkeypatch):
    output, whole = tmp_path / "out", tmp_path / "whole"
    lines = [{"id": f"c{n}", "prompt": f"y = {n}" * (1 + n % 7)} for n in range(40)]
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(given, whole).exit_code == 0
    monkeypatch.setenv("RAY_ADDRESS", machines)
    process = started(given, output, "--ray")
    wait_for_rows(process, output, 1)
    os.kill(workers()[0], signal.SIGKILL)  # another worker takes over its prompts
    _, said = process.communicate()
    assert process.returncode == 0, said
    assert "Ray: machines 2, models 2," in said
    assert settled(output) == settled(whole)


def test_what_a_worker_refuses_is_refused_in_one_line(given, tmp_path):
    process = started(given, tmp_path / "out", "--exit-layer", "99", "--ray")
    _, said = process.communicate()
    assert process.returncode == 2
    assert "99" in said.splitlines()[-1].removeprefix("layerskip: error: ")
    assert "Traceback" not in said
    assert not rows(tmp_path / "out")


def test_more_workers_than_a_cluster_has_room_for_are_refused(monkeypatch):
    from layerskip.serving import ray as ours

    monkeypatch.setattr(ours.ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}])
    monkeypatch.setattr(ours.ray, "cluster_resources", lambda: {"CPU": 2.0, "GPU": 1.0})
    for gpus, room in ((True, "GPUs, the cluster has 1"), (False, "CPUs, the cluster has 2")):
        with pytest.raises(ValueError, match=f"3 workers need as many {room}"):
            ours.answer_by_ray(Any, [], Any, print, workers=3, gpus=gpus)


@pytest.fixture
def served():
    """The address of a server with two replicas."""
    import ray
    from ray import serve

    from layerskip.serving.ray import cluster, deployment

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    settings = {"execution": "fused", "draft_memory": 0, "controller": "fixed"}
    with cluster("local", workers=4):
        serve.start(http_options={"port": port})
        application = deployment("demo-llama", replicas=2, api_key="a key", **settings)
        serve.run(application)
        assert len([each for each in ray.nodes() if each["Alive"]]) == 1
        yield f"http://127.0.0.1:{port}/v1"
        serve.shutdown()


def test_replicas_of_a_server_write_the_text_of_generate(served):
    loaded = load("demo-llama", device="cpu", dtype="float32")
    body = {"model": "demo-llama", "max_tokens": 12, "temperature": 0.9, "top_k": 20}
    key = {"Authorization": "Bearer a key"}
    assert httpx.post(f"{served}/completions", json=body).status_code == 401
    for number in range(8):
        text = f"x = {number}"
        ids = encode(loaded.tokenizer, Prompt(id="1", text=text))  # (1, T)
        law = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 1.0}
        output = layerskip.generate(
            loaded.model, ids, max_new_tokens=12, seeds=[number], execution="fused", **law
        )
        expected = decode_text(loaded.tokenizer, output.sequences[0, ids.shape[1] :].tolist())
        asked = body | {"prompt": text, "seed": number, "top_p": 1}
        answer = httpx.post(f"{served}/completions", json=asked, headers=key, timeout=60)
        assert answer.json()["choices"][0]["text"] == expected
    events = httpx.post(
        f"{served}/completions", json=asked | {"stream": True}, headers=key, timeout=60
    )
    pieces = [line.removeprefix("data: ") for line in events.text.splitlines() if line]
    assert pieces.pop() == "[DONE]"
    assert "".join(json.loads(piece)["choices"][0]["text"] for piece in pieces) == expected
