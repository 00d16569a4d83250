"""What runs on compute nodes: ``agent.py``, one file for the node's own Python."""
