"""The daemon: workers that connect sources, journal and consumers, and their supervisor.

``__main__`` reads the configuration and calls `serve.run_daemon`, which starts the `Supervisor`
with the workers from `workers.make_workers` (or `controller.make_controller_workers`). Each worker
is a forked process: the journal's writer, sources that append to it (`source_workers.py`),
consumers that read from it (`consumer_workers.py`), and the socket server (`socket.py`),
which forks again for each connection (`request_service.py`, `idempotency.py`). `registry.py`
and `contexts.py` list the actions that the socket offers. `once.py` and `imports.py` do without the
supervisor; `reload.py` reloads the configuration.
"""
