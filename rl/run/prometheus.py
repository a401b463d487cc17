"""A run's metrics for Prometheus: --prometheus-port. docs/metrics.md says what is served."""

import re
import time
from collections.abc import Iterator
from typing import Any

import prometheus_client
from prometheus_client.core import CollectorRegistry, GaugeMetricFamily

from rl.ranks import Ranks
from rl.run.together import together
from rl.run.tracking import Logging


def name_of(metric: str) -> str:
    """`actor/entropy` -> `glassrl_actor_entropy`: letters, digits and _ are what Prometheus takes."""
    return "glassrl_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)


class Exporter:
    """Serves the newest value of every metric on rank 0, and the process's own registry (vLLM's metrics, memory and CPU
    time), until `close`. Does nothing without a port.

    Raises ValueError, on every rank, if the port is in use. All ranks must enter.
    """

    def __init__(self, flags: Logging, ranks: Ranks):
        self.labels = {"project": flags.project_name, "experiment": flags.experiment_name}
        self.newest: dict[str, tuple[str, float]] = {}  # name for Prometheus -> our name, value
        self.server: Any = None
        if flags.prometheus_port is None:
            return
        together(lambda: self._serve(flags.prometheus_port) if ranks.is_main else None)

    def _serve(self, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(self)
        registry.register(prometheus_client.REGISTRY)
        try:
            self.server, _ = prometheus_client.start_http_server(port, registry=registry)
        except OSError as error:
            raise ValueError(
                f"--prometheus-port {port} cannot be served from this machine ({error}); another run may have it: "
                "choose another port"
            ) from error

    def update(self, step: int, metrics: dict[str, float]) -> None:
        """Serve the metrics of a step from now on. What they do not name keeps its last value."""
        if self.server is not None:
            new = {**metrics, "step": step, "logged_at_seconds": time.time()}
            self.newest = self.newest | {name_of(name): (name, float(value)) for name, value in new.items()}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """What prometheus_client asks for at each scrape, in a thread of its own."""
        for served_as, (name, value) in self.newest.items():
            family = GaugeMetricFamily(served_as, name, labels=list(self.labels))
            family.add_metric(list(self.labels.values()), value)
            yield family

    def close(self) -> None:
        """Free the port."""
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
