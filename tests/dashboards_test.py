"""Grafana's panels and the alerts against Debian's Prometheus, which scrapes daemons under load and what vLLM's
connector counts, and promtool's checks.

Skipped where Prometheus is not installed. Windows and waiting times of rules and panels are shortened, so that a test
takes seconds; what they mean in full is tested by promtool's clock in prometheus/alerts_test.yml."""

from __future__ import annotations

import contextlib
import glob
import http.server
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import unittest
import unittest.mock
import urllib.parse
import urllib.request

import kvmanager_testing
from kvmanager_testing import data_path

DEADLINE_S = 120  # of what should take seconds
WINDOW = "10s"
QUIET = ("--log-level", "error")
SAMPLE_ALL = ("--quality-sample", "1")
# What panels may show as 0, and the test's daemons move.
MOVED = (
    'kvmanager_prefix_hit_tier_blocks_total{tier="disk"}',
    "kvmanager_disk_blocks",
    "kvmanager_disk_written_bytes_total",
    "kvmanager_disk_read_bytes_total",
    "kvmanager_evicted_blocks_total",
    "kvmanager_retained_bytes",
    "kvmanager_disk_retained_bytes",
    "kvmanager_recorded_blocks",
    "kvmanager_recovered_blocks_total",
)


def prometheus_file(name: str) -> str:
    return data_path("monitoring/prometheus/" + name)


def shorten(text: str) -> str:
    """The same rules or query with windows and waiting times of seconds."""
    text = text.replace("$__rate_interval", WINDOW).replace("$instance", ".*").replace("$engine", ".*")
    text = re.sub(r"\[(\d+[mhd])\] offset \S+?\)", f"[{WINDOW}] offset {WINDOW})", text)
    text = re.sub(r"\[\d+[mhd]\]", f"[{WINDOW}]", text)
    return re.sub(r"(?m)^(\s+for: )\d+[mhd]$", r"\g<1>1s", text)


def boards() -> list[dict]:
    found = []
    for path in sorted(glob.glob(data_path("monitoring/grafana/*.json"))):
        with open(path, encoding="utf-8") as file:
            found.append(json.load(file))
    return found


def panels() -> list[tuple[str, str]]:
    """Dashboard and panel, and one query of it."""
    queries = []
    for board in boards():
        for panel in board["panels"]:
            for target in panel["targets"]:
                queries.append((f"{board['title']} / {panel['title']}", target["expr"]))
    return queries


def alerts() -> list[str]:
    with open(prometheus_file("alerts.yml"), encoding="utf-8") as file:
        return re.findall(r"(?m)^\s+- alert: (\w+)$", file.read())


class Counter:
    """What the connector uses of prometheus_client's."""

    def __init__(self, name: str, documentation: str, labelnames: list[str]) -> None:
        self.name = name
        self.total = 0.0

    def labels(self, *values: str) -> Counter:
        return self

    def inc(self, amount: float) -> None:
        self.total += amount

    def text(self) -> str:
        return f'{self.name}_total{{engine="0"}} {self.total}\n'


class Histogram:
    def __init__(self, name: str, documentation: str, labelnames: list[str], buckets: tuple[float, ...]) -> None:
        self.name = name
        self.edges = (*buckets, float("inf"))
        self.observed: list[float] = []

    def labels(self, *values: str) -> Histogram:
        return self

    def observe(self, value: float) -> None:
        self.observed.append(value)

    def text(self) -> str:
        lines = [f'_bucket{{engine="0",le="{"+Inf" if edge == float("inf") else edge}"}} {sum(v <= edge for v in self.observed)}'
                 for edge in self.edges]
        lines += [f'_sum{{engine="0"}} {sum(self.observed)}', f'_count{{engine="0"}} {len(self.observed)}']
        return "".join(f"{self.name}{line}\n" for line in lines)


class PromMetrics:
    """vLLM's base of them. It has the classes of counters, gauges and histograms by prometheus_client's."""

    def __init__(self, vllm_config: object, metric_types: tuple, labelnames: list[str], per_engine_labelvalues: dict) -> None:
        self._counter_cls, self._histogram_cls = metric_types
        self.per_engine_labelvalues = per_engine_labelvalues


def connector_metrics() -> types.ModuleType:
    """The module of vLLM's connector that names its metrics, without vLLM."""
    vllm = types.ModuleType("metrics")
    vllm.KVConnectorPromMetrics, vllm.KVConnectorStats = PromMetrics, object
    (package,) = importlib.util.find_spec("kvmanager").submodule_search_locations
    spec = importlib.util.spec_from_file_location("connector_metrics", os.path.join(package, "vllm", "metrics.py"))
    module = importlib.util.module_from_spec(spec)
    with unittest.mock.patch.dict(sys.modules, {"vllm.distributed.kv_transfer.kv_connector.v1.metrics": vllm}):
        spec.loader.exec_module(module)
    return module


class Engine:
    """Stands for a vLLM with the connector: its /metrics alone, where every count moves between two looks."""

    def __init__(self) -> None:
        module = connector_metrics()
        made: list[Counter | Histogram] = []

        def keep(kind: type):
            def make(*words: object, **more: object) -> Counter | Histogram:
                made.append(kind(*words, **more))
                return made[-1]
            return make

        metrics = module.KvManagerPromMetrics(None, (keep(Counter), keep(Histogram)), ["engine"], {0: ["0"]})

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                metrics.observe({**dict.fromkeys(module.COUNTERS, 100), **dict.fromkeys(module.SECONDS, [0.02, 0.2])})
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write("".join(each.text() for each in made).encode())

            def log_message(self, *words: object) -> None:
                pass

        self._server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.metrics = "127.0.0.1:%d" % self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> Engine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Prometheus:
    """One that scrapes `targets`, and `engines` as another job, every second by the shortened rules of this repository."""

    def __init__(self, targets: list[str], engines: tuple[str, ...] = ()) -> None:
        self.directory = tempfile.mkdtemp(prefix="kvprom")
        for name in ("recording_rules.yml", "alerts.yml"):
            with open(prometheus_file(name), encoding="utf-8") as file:
                rules = shorten(file.read())
            with open(os.path.join(self.directory, name), "w", encoding="utf-8") as file:
                file.write(rules)
        with open(prometheus_file("prometheus.yml"), encoding="utf-8") as file:
            config = file.read().replace("15s", "1s").replace('"127.0.0.1:9464"', ", ".join(f'"{t}"' for t in targets))
        if engines:
            config += f"\n  - job_name: vllm\n    static_configs:\n      - targets: {json.dumps(engines)}\n"
        path = os.path.join(self.directory, "prometheus.yml")
        with open(path, "w", encoding="utf-8") as file:
            file.write(config)
        self.log = open(os.path.join(self.directory, "log"), "w+b")  # noqa: SIM115
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = "127.0.0.1:%d" % free.getsockname()[1]
        self.process = subprocess.Popen(
            ["prometheus", f"--config.file={path}", f"--storage.tsdb.path={self.directory}/data",
             f"--web.listen-address={self.address}"],
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, preexec_fn=kvmanager_testing._die_with_parent)

    def get(self, path: str, **parameters: str) -> dict:
        url = f"http://{self.address}{path}?" + urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error
        except OSError:
            if self.process.poll() is not None:
                self.log.seek(0)
                raise AssertionError(self.log.read().decode()[-2000:]) from None
            return {}

    def has_data(self, query: str) -> bool:
        """Whether a query gives a number."""
        return any(sample["value"][1] != "NaN" for sample in self.get("/api/v1/query", query=query).get("result", []))

    def firing(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in self.get("/api/v1/alerts").get("alerts", [])
                if alert["state"] == "firing"}

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()
        shutil.rmtree(self.directory, ignore_errors=True)


@contextlib.contextmanager
def helper(program: str, *words: str, stdout: int | None = None):
    """A program of //tests that runs until its standard input ends."""
    with subprocess.Popen([data_path("tests/" + program), *words], stdin=subprocess.PIPE, stdout=stdout, text=True) as process:
        yield process
        process.stdin.close()
        if process.wait(timeout=DEADLINE_S) != 0:
            raise AssertionError(f"{program} ended with {process.returncode}")


def until(missing, process) -> None:
    """Waits until missing() is empty, which it names if that takes too long or `process` has ended."""
    end = time.monotonic() + DEADLINE_S
    while True:
        left = missing()
        if not left:
            return
        if process.poll() is not None:
            raise AssertionError(f"the load ended with {process.returncode}")
        if time.monotonic() > end:
            raise AssertionError("\n".join(["still without:"] + sorted(map(str, left))))
        time.sleep(0.5)  # between two looks at a clock of seconds


class Files(unittest.TestCase):
    def test_every_dashboard_is_whole(self) -> None:
        uids = [board["uid"] for board in boards()]
        self.assertEqual(len(set(uids)), len(uids))
        for board in boards():
            variables = {each["name"] for each in board["templating"]["list"]} | {"__rate_interval"}
            ids = [panel["id"] for panel in board["panels"]]
            cells: list[tuple[int, int]] = []
            for panel in board["panels"]:
                place = panel["gridPos"]
                self.assertLessEqual(place["x"] + place["w"], 24)
                cells += [(x, y) for x in range(place["x"], place["x"] + place["w"])
                          for y in range(place["y"], place["y"] + place["h"])]
                for target in panel["targets"]:
                    with self.subTest(board=board["title"], panel=panel["title"], query=target["expr"]):
                        self.assertEqual(set(re.findall(r"\$(\w+)", target["expr"])) - variables, set())
                        self.assertRegex(target["expr"], r'instance=~"\$(instance|engine)"')
            with self.subTest(board=board["title"]):
                self.assertEqual(len(set(ids)), len(ids))
                self.assertEqual(len(set(cells)), len(cells), "panels overlap")

    def test_every_metric_of_the_connector_is_in_its_documentation_and_drawn(self) -> None:
        module = connector_metrics()
        counted = {f"{name}_total" for name in module.COUNTERS} | set(module.SECONDS)
        with open(data_path("docs/engines.md"), encoding="utf-8") as file:
            lists = re.findall(r"`vllm:kvmanager_\{([\w,]+)\}(_\w+)`", file.read())
        self.assertEqual({name + end for names, end in lists for name in names.split(",")}, counted)
        drawn = {re.sub(r"_seconds_(bucket|count|sum)$", "_seconds", name)
                 for _, query in panels() for name in re.findall(r"vllm:kvmanager_(\w+)", query)}
        self.assertEqual(drawn, counted)

    def test_every_metric_is_in_the_catalogue(self) -> None:
        with open(data_path("docs/metrics.md"), encoding="utf-8") as file:
            known = set(re.findall(r"(?m)^\| `(kvmanager_\w+)` \|", file.read()))
        texts = {name: query for name, query in panels()}
        for name in ("recording_rules.yml", "alerts.yml", "alerts_test.yml"):
            with open(prometheus_file(name), encoding="utf-8") as file:
                texts[name] = file.read()
        for name, text in texts.items():
            # A recorded series is LEVEL:NAME:HOW, and no metric.
            for metric in re.findall(r"(?<![\w:])kvmanager_\w+(?![\w:])", text):
                base = re.sub(r"_(bucket|count|sum)$", "", metric)
                with self.subTest(where=name, metric=metric):
                    self.assertTrue(metric in known or base in known)

    def test_every_recorded_series_that_is_used_is_recorded(self) -> None:
        with open(prometheus_file("recording_rules.yml"), encoding="utf-8") as file:
            recorded = set(re.findall(r"record: (\S+)", file.read()))
        with open(prometheus_file("alerts.yml"), encoding="utf-8") as file:
            texts = [file.read()] + [query for _, query in panels()]
        used = {name for text in texts for name in re.findall(r"\w+:kvmanager_\w+:\w+", text)}
        self.assertEqual(used - recorded, set())

    def test_every_alert_says_what_to_do_and_has_a_test(self) -> None:
        with open(prometheus_file("alerts.yml"), encoding="utf-8") as file:
            rules = file.read().split("- alert: ")[1:]
        with open(prometheus_file("alerts_test.yml"), encoding="utf-8") as file:
            tested = set(re.findall(r'alertname="(\w+)"', file.read()))
        self.assertGreater(len(rules), 10)
        for rule in rules:
            name = rule.split()[0]
            with self.subTest(name=name):
                self.assertIn(name, tested)
                self.assertRegex(rule, r"labels: \{severity: (page|ticket)\}")
                self.assertGreater(len(rule.split("description: >-")[1].split()), 15)


@unittest.skipUnless(shutil.which("promtool"), "promtool is not installed: apt-get install prometheus")
class Promtool(unittest.TestCase):
    def check(self, *words: str) -> None:
        done = subprocess.run(["promtool", *words], capture_output=True, text=True, check=False,
                              cwd=os.path.dirname(prometheus_file("alerts.yml")))
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_configuration(self) -> None:
        self.check("check", "config", "prometheus.yml")

    def test_rules(self) -> None:
        self.check("check", "rules", "recording_rules.yml", "alerts.yml")

    def test_alerts_fire(self) -> None:
        self.check("test", "rules", "alerts_test.yml")


@unittest.skipUnless(shutil.which("prometheus"), "Prometheus is not installed: apt-get install prometheus")
class Scraped(unittest.TestCase):
    def on_a_bad_disk(self) -> kvmanager_testing.Daemon:
        """A small daemon whose disk's index is missing, and whose writes fail."""
        disk = tempfile.mkdtemp(prefix="kvdisk")  # mode 0700
        self.addCleanup(shutil.rmtree, disk)
        os.mkdir(f"{disk}/segments")
        with open(f"{disk}/segments/1", "wb"):
            pass
        with unittest.mock.patch.dict(os.environ, KVMANAGER_FAILPOINTS="disk.write=1/1"):
            return kvmanager_testing.Daemon("32MiB", QUIET + ("--disk-path", disk, "--disk-bytes", "64MiB"))

    def restarted(self, flags: tuple[str, ...]) -> kvmanager_testing.Daemon:
        """A small daemon with a disk and kept memory, which it has found after a kill -9."""
        folder = tempfile.mkdtemp(prefix="kvkept")
        self.addCleanup(shutil.rmtree, folder)
        # By lru what returns behind more others than fit is not found in memory: the disk is read.
        flags += ("--disk-path", f"{folder}/disk", "--disk-bytes", "256MiB", "--state-dir", f"{folder}/state",
                  "--state-keep-s", "60", "--eviction", "lru")
        daemon = self.enterContext(kvmanager_testing.Daemon("32MiB", flags))
        with helper("daemon_load", daemon.listen, stdout=subprocess.PIPE) as load:
            self.assertEqual(load.stdout.readline(), "loaded\n")
        daemon.kill()
        daemon.start()
        return daemon

    def with_nobody_who_keeps(self) -> kvmanager_testing.Daemon:
        """A small daemon whose keeper has ended, and that can reach no other one: a folder is where its socket was."""
        state = tempfile.mkdtemp(prefix="kvstate")  # mode 0700
        self.addCleanup(shutil.rmtree, state)
        daemon = kvmanager_testing.Daemon("32MiB", QUIET + ("--state-dir", state))
        os.kill(daemon.process.pid, signal.SIGSTOP)
        subprocess.run(["pkill", "-KILL", "-f", "--", f"--keeper {state}"], check=True)
        os.unlink(f"{state}/keeper")
        os.mkdir(f"{state}/keeper")
        os.kill(daemon.process.pid, signal.SIGCONT)
        return daemon

    def test_every_panel_has_data(self) -> None:
        flags = QUIET + SAMPLE_ALL
        queries = [(name, shorten(query)) for name, query in panels()]
        queries += [("what moved", f"{name} > 0") for name in MOVED]
        self.assertGreater(len(queries), 100)
        daemon = self.restarted(flags)
        with kvmanager_testing.Daemon("32MiB", flags) as peer, Engine() as engine, \
                helper("daemon_load", daemon.listen, "--peer", peer.listen, "--peer-address", peer.peer, "--returns",
                       "13") as load, \
                Prometheus([daemon.metrics, peer.metrics], (engine.metrics,)) as prometheus:
            until(lambda: [each for each in queries if not prometheus.has_data(each[1])], load)

    def test_alerts_fire(self) -> None:
        flags = QUIET + ("--peer-local-copy", "off", "--hand-off-lease-ms", "200")
        with socket.socket() as nobody, self.on_a_bad_disk() as small, self.with_nobody_who_keeps() as unkept, \
                kvmanager_testing.Daemon("48MiB", flags) as daemon, kvmanager_testing.Daemon("48MiB", flags) as peer, \
                kvmanager_testing.Daemon("32MiB", QUIET) as draining, \
                kvmanager_testing.Daemon("96MiB", QUIET + SAMPLE_ALL + ("--threads", "1")) as strained:
            nobody.bind(("127.0.0.1", 0))  # nobody listens there
            down = "127.0.0.1:%d" % nobody.getsockname()[1]
            subprocess.run([data_path("client/cli/kvctl"), "--connect", draining.listen, "drain"], check=True,
                           stdout=subprocess.DEVNULL)
            with helper("daemon_load", small.listen), helper("daemon_strain", strained.listen), \
                    helper("daemon_trouble", daemon.listen, "--peer", peer.peer, "--draining", draining.peer) as trouble, \
                    Prometheus([each.metrics for each in (small, unkept, daemon, peer, draining, strained)]
                               + [down]) as prometheus:
                seen: set[str] = set()

                def missing() -> set[str]:
                    seen.update(prometheus.firing())
                    return set(alerts()) - seen

                until(missing, trouble)


if __name__ == "__main__":
    unittest.main()
