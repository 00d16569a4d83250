"""Node agent: ``agent.py``, one file that runs on compute nodes with the node's own Python."""
