"""Who is there: groups, their engines, nodes, and who has been silent for how long; bounded."""

from __future__ import annotations

from kvmoverd.core.scheduling.limits import Limits
from kvmoverd.core.scheduling.reports import BadReport, GroupReport, Sources
from kvmoverd.core.scheduling.state import Engine, Group, Node


class Roster:
    """By their names, which are unique in the cluster."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.nodes: dict[str, Node] = {}
        self.groups: dict[str, Group] = {}
        self.engines: dict[str, Engine] = {}
        self.group_sources = Sources(limits.group_silent_ns)
        self.node_sources = Sources(limits.node_silent_ns)

    def node(self, name: str) -> Node:
        """Raises `BadReport` for one too many."""
        node = self.nodes.get(name)
        if node is None:
            if len(self.nodes) >= self._limits.nodes_max:
                raise BadReport(
                    f"node {name!r} would be the {len(self.nodes) + 1}th, at most {self._limits.nodes_max} are"
                )
            node = self.nodes[name] = Node(name, self._limits.read_lag_ns)
        return node

    def check(self, report: GroupReport) -> None:
        """Before anything is changed: engines of other groups, another role or model, too many. Raises `BadReport`."""
        group = self.groups.get(report.group)
        if group is not None and group.boot_id == report.boot_id:
            if (group.model, group.role) != (report.model, report.role):
                raise BadReport(f"group {report.group!r} was {group.role.value} of {group.model!r} in this boot")
            if [said.engine for said in report.engines] == list(group.engines):
                return
        for said in report.engines:
            engine = self.engines.get(said.engine)
            if engine is not None and engine.group.name != report.group:
                raise BadReport(f"engine {said.engine!r} of group {report.group!r} is one of {engine.group.name!r}")
        engines = sum(said.engine not in self.engines for said in report.engines) + len(self.engines)
        nodes = len({said.node for said in report.engines} - self.nodes.keys()) + len(self.nodes)
        if engines > self._limits.engines_max or nodes > self._limits.nodes_max:
            raise BadReport(
                f"with group {report.group!r} there would be {engines} engines on {nodes} nodes, at most "
                f"{self._limits.engines_max} and {self._limits.nodes_max} are"
            )

    def join(self, group: Group, name: str, node_name: str) -> Engine:
        node = self.node(node_name)
        engine = Engine(name, node, group)
        group.engines[name] = node.engines[name] = self.engines[name] = engine
        return engine

    def leave(self, engine: Engine) -> None:
        """A node of which nothing is left but that it never reported is gone with its last engine."""
        node = engine.node
        del engine.group.engines[engine.name], node.engines[engine.name], self.engines[engine.name]
        if not node.engines and node.name not in self.node_sources:
            self.nodes.pop(node.name, None)

    def silent_nodes(self, now_ns: int) -> list[Node]:
        """Those whose numbers are not believed any more, each once; those without engines are gone."""
        found = [self.nodes[name] for name in list(self.node_sources.silent(now_ns))]
        for node in found:
            self.node_sources.forget(node.name)
            if not node.engines:
                del self.nodes[node.name]
        return found
