"""Source for compute nodes: receives what their agents send and turns it into events.

An agent connects to ``http`` (in the daemon, or in the separate process of ``listener``);
``receiver`` takes its batch, ``senders`` verifies the node, ``aggregation`` makes events of the
lines, and ``node_reports`` records when each node reported.
"""
