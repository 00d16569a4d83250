"""Job page (``steward job``): a job's record, usage and efficiency, notes, and why it is pending.

``page`` answers a request (``requests``): it computes efficiency (``job_efficiency``), writes notes
(``notes``) and explains why a job is pending (``pending_reasons``). ``wording`` turns the reply
into phrases for terminal and web.
"""
