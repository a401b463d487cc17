"""A run's metrics for Prometheus: --prometheus-port. docs/viewing.md says what is served."""

import re
import time
from collections.abc import Iterator

import prometheus_client
from prometheus_client.core import CollectorRegistry, GaugeMetricFamily

from extras.trackers import Sink


def name_of(metric: str) -> str:
    """`actor/entropy` -> `glassrl_actor_entropy`: letters, digits and _ are what Prometheus takes."""
    return "glassrl_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)


class Newest:
    """The newest value of every metric, as a collector of prometheus_client."""

    def __init__(self, labels: dict[str, str]):
        self.labels = labels
        self.values: dict[str, tuple[str, float]] = {}  # name for Prometheus -> our name, value

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Serve the metrics of a step from now on. What they do not name keeps its last value."""
        new = {**metrics, "step": step, "logged_at_seconds": time.time()}
        self.values = self.values | {name_of(name): (name, float(value)) for name, value in new.items()}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """What prometheus_client asks for at each scrape, in a thread of its own."""
        for served_as, (name, value) in self.values.items():
            family = GaugeMetricFamily(served_as, name, labels=list(self.labels))
            family.add_metric(list(self.labels.values()), value)
            yield family


def serve(port: int, project: str, experiment: str) -> Sink:
    """Serve the newest value of every metric, and the process's own registry (vLLM's metrics, memory and CPU time),
    until the sink is closed. Raises ValueError if the port is in use.
    """
    newest, registry = Newest({"project": project, "experiment": experiment}), CollectorRegistry()
    registry.register(newest)
    registry.register(prometheus_client.REGISTRY)
    try:
        server, _ = prometheus_client.start_http_server(port, registry=registry)
    except OSError as error:
        raise ValueError(
            f"--prometheus-port {port} cannot be served from this machine ({error}); another run may have it: "
            "choose another port"
        ) from error

    def close() -> None:
        server.shutdown()
        server.server_close()  # frees the port

    return Sink(newest.log, lambda step, kind, responses: None, close)
