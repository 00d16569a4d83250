"""How nodes are, kept from one page to the next: thousands of them are told once, not each time.

The daemon is asked each time all the same, since it decides who may see nodes; it only does
not repeat what has not changed.
"""

import msgspec

from steward.reports.history.shapes import NodesAnswer, NodesRequest
from steward.web.visit import Visit


class KnownNodes:
    """What was told of each cluster's nodes last."""

    def __init__(self) -> None:
        self._told: dict[str, NodesAnswer] = {}

    async def of(self, visit: Visit, cluster: str) -> NodesAnswer:
        """How all nodes of a cluster are now.

        Args:
            visit: Whose page it is for.
            cluster: One of those that there are.

        Raises:
            StewardError: Whatever the daemon refuses or cannot do.
        """
        told = self._told.get(cluster)
        request = NodesRequest(cluster=cluster, known=told.tag if told else "")
        answer: NodesAnswer = await visit.ask("history.nodes", request)
        if told is not None and answer.is_known:
            return msgspec.structs.replace(answer, nodes=told.nodes)
        self._told[cluster] = answer
        return answer
