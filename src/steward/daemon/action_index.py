"""Index of actions: where each is declared, and its command.

Help pages read it, and a command imports only the module of its action.

``make index`` writes this file from the declarations; do not edit it.
"""

from typing import Final, NamedTuple


class IndexEntry(NamedTuple):
    """One action.

    Attributes:
        module: Module that declares it.
        command: Words of its command; "" if it has none or one written by hand.
        role: Audience of the command.
        help: One line for people.
        printer: Module of the command line that prints its reply; "" for a table.
    """

    module: str
    command: str
    role: str
    help: str
    printer: str = ""


ACTION_INDEX: Final[dict[str, IndexEntry]] = {
    "accounting.dump": IndexEntry(
        "steward.extensions.jobacct_plugins.log.actions",
        "accounting dump",
        "operator",
        "Print the records of the job log.",
        "steward.cli.accounting",
    ),
    "accounting.gaps": IndexEntry(
        "steward.accounting.gaps",
        "",
        "operator",
        "List gaps in accounting data: lost records, silent nodes, CPU time without a job.",
    ),
    "accounting.job": IndexEntry(
        "steward.accounting.job_page.page",
        "",
        "everyone",
        "Show a job with its resource use and efficiency.",
    ),
    "accounting.job_states": IndexEntry(
        "steward.accounting.job_list", "", "everyone", "Count jobs by state."
    ),
    "accounting.jobs": IndexEntry(
        "steward.accounting.job_list",
        "",
        "everyone",
        "List jobs with their allocated and used resources.",
    ),
    "accounting.plugins": IndexEntry(
        "steward.extensions.jobacct_plugins.actions",
        "accounting plugins",
        "operator",
        "Show the accounting plugins with their state and last error.",
    ),
    "accounting.purge": IndexEntry(
        "steward.extensions.jobacct_plugins.log.actions",
        "accounting purge",
        "operator",
        "Remove accounting data of old jobs.",
        "steward.cli.accounting",
    ),
    "accounting.sacct": IndexEntry(
        "steward.accounting.sacct.output",
        "",
        "everyone",
        "List jobs and steps with their resource use, as text.",
    ),
    "archive.diff": IndexEntry(
        "steward.archive.lookup",
        "archive diff",
        "everyone",
        "Compare the scripts of two jobs.",
        "steward.cli.archive",
    ),
    "archive.env": IndexEntry(
        "steward.archive.lookup",
        "archive env",
        "everyone",
        "Show the environment of a job at submission.",
        "steward.cli.archive",
    ),
    "archive.erase": IndexEntry(
        "steward.archive.maintenance",
        "archive erase",
        "operator",
        "Remove scripts and environments permanently.",
    ),
    "archive.export": IndexEntry(
        "steward.archive.export",
        "archive export",
        "everyone",
        "Export scripts of jobs to a directory or a tar.",
        "steward.cli.archive",
    ),
    "archive.list": IndexEntry(
        "steward.archive.lookup", "archive list", "everyone", "List jobs, newest first."
    ),
    "archive.reindex": IndexEntry(
        "steward.archive.maintenance",
        "archive reindex",
        "administrator",
        "Rebuild the catalog from the archived files.",
        "steward.cli.archive",
    ),
    "archive.resend": IndexEntry(
        "steward.archive.maintenance",
        "archive resend",
        "operator",
        "Archive scripts again in a sink.",
        "steward.cli.archive",
    ),
    "archive.search": IndexEntry(
        "steward.archive.lookup",
        "archive search",
        "everyone",
        "Search scripts for text, newest jobs first.",
        "steward.cli.archive",
    ),
    "archive.secrets": IndexEntry(
        "steward.archive.export",
        "archive secrets",
        "operator",
        "List script lines that look like credentials, without their text.",
        "steward.cli.archive",
    ),
    "archive.show": IndexEntry(
        "steward.archive.lookup",
        "archive show",
        "everyone",
        "Show a job and its script.",
        "steward.cli.archive",
    ),
    "archive.sinks": IndexEntry(
        "steward.archive.maintenance",
        "archive sinks",
        "operator",
        "Show state, backlog and errors of each sink.",
    ),
    "archive.verify": IndexEntry(
        "steward.archive.maintenance",
        "archive verify",
        "operator",
        "Recompute the checksum of every archived file.",
        "steward.cli.archive",
    ),
    "automation.audit": IndexEntry(
        "steward.automation.actions",
        "action audit",
        "everyone",
        "Show the audit log: actions, their callers and their results.",
    ),
    "automation.help": IndexEntry(
        "steward.automation.actions",
        "action help",
        "everyone",
        "Describe an action: its parameters and its result.",
        "steward.cli.action",
    ),
    "automation.list": IndexEntry(
        "steward.automation.actions",
        "action list",
        "everyone",
        "List the actions on clusters with their parameters.",
    ),
    "automation.run": IndexEntry(
        "steward.automation.actions",
        "action run",
        "everyone",
        "Run an action on a cluster.",
        "steward.cli.action",
    ),
    "bank.account_change": IndexEntry(
        "steward.bank.actions.accounts", "bank account change", "operator", "Change an account."
    ),
    "bank.account_create": IndexEntry(
        "steward.bank.actions.accounts", "bank account create", "operator", "Create an account."
    ),
    "bank.account_show": IndexEntry(
        "steward.bank.actions.accounts", "bank account show", "everyone", "Show accounts."
    ),
    "bank.adjust": IndexEntry(
        "steward.bank.actions.money",
        "bank adjust",
        "operator",
        "Adjust the balance of an account by hand.",
    ),
    "bank.allocation_change": IndexEntry(
        "steward.bank.actions.accounts",
        "bank allocation change",
        "operator",
        "Change the period, rollover or description of an allocation.",
    ),
    "bank.allocation_create": IndexEntry(
        "steward.bank.actions.accounts",
        "bank allocation create",
        "operator",
        "Create an allocation: service units for a period.",
    ),
    "bank.allocation_show": IndexEntry(
        "steward.bank.actions.accounts", "bank allocation show", "everyone", "Show allocations."
    ),
    "bank.allow": IndexEntry(
        "steward.bank.actions.jobs",
        "bank allow",
        "operator",
        "Allow a job past the gate without sufficient funds.",
        "steward.cli.bank_jobs",
    ),
    "bank.backfill": IndexEntry(
        "steward.bank.actions.maintenance",
        "bank backfill",
        "operator",
        "Charge jobs that ran before the bank was enabled.",
        "steward.cli.bank_maintenance",
    ),
    "bank.balance": IndexEntry(
        "steward.bank.actions.reports",
        "bank balance",
        "everyone",
        "Show account balances, holds and available SU.",
    ),
    "bank.balance_history": IndexEntry(
        "steward.bank.actions.reports",
        "",
        "everyone",
        "Show balance and spending of an account, day by day.",
    ),
    "bank.charged": IndexEntry(
        "steward.bank.actions.jobs", "", "everyone", "Sum up the charges of each job."
    ),
    "bank.check": IndexEntry(
        "steward.bank.actions.maintenance",
        "bank check",
        "operator",
        "Check the ledger, and compare SU holds with jobs.",
    ),
    "bank.deposit": IndexEntry(
        "steward.bank.actions.money",
        "bank deposit",
        "operator",
        "Deposit service units in an account.",
    ),
    "bank.explain": IndexEntry(
        "steward.bank.actions.jobs",
        "bank explain",
        "everyone",
        "Explain the charges of a job.",
        "steward.cli.bank_jobs",
    ),
    "bank.holds": IndexEntry(
        "steward.bank.actions.reports",
        "bank holds",
        "everyone",
        "List holds: service units reserved for queued and running jobs.",
    ),
    "bank.import": IndexEntry(
        "steward.bank.actions.maintenance",
        "bank import",
        "administrator",
        "Import accounts, users, allocations and rates.",
        "steward.cli.bank_maintenance",
    ),
    "bank.mode": IndexEntry(
        "steward.bank.actions.rates",
        "bank mode",
        "operator",
        "Show or set the mode of the bank: off, observe or enforce.",
    ),
    "bank.notices": IndexEntry(
        "steward.bank.actions.maintenance",
        "",
        "operator",
        "List undelivered mails and other notices, dead letters included.",
    ),
    "bank.notices_retry": IndexEntry(
        "steward.bank.actions.maintenance",
        "",
        "operator",
        "Retry undelivered notices and reset their count of attempts.",
    ),
    "bank.quote": IndexEntry(
        "steward.bank.actions.quotes", "", "everyone", "Quote the highest price of a job."
    ),
    "bank.rate_change": IndexEntry(
        "steward.bank.actions.rates",
        "bank rate change",
        "operator",
        "Change parts of a rate, from a time on.",
    ),
    "bank.rate_create": IndexEntry(
        "steward.bank.actions.rates",
        "bank rate create",
        "operator",
        "Create a rate: the price of jobs from a time on.",
    ),
    "bank.rate_show": IndexEntry(
        "steward.bank.actions.rates",
        "bank rate show",
        "everyone",
        "Show rates: the prices of jobs.",
    ),
    "bank.reconcile": IndexEntry(
        "steward.bank.actions.maintenance",
        "bank reconcile",
        "operator",
        "Compare charges with Slurm's records and correct differences.",
    ),
    "bank.refund": IndexEntry(
        "steward.bank.actions.money",
        "bank refund",
        "operator",
        "Refund charges of a job or of an account.",
    ),
    "bank.statement": IndexEntry(
        "steward.bank.actions.reports",
        "bank statement",
        "everyone",
        "Show the transactions of an account, with the balance after each.",
        "steward.cli.bank_reports",
    ),
    "bank.status": IndexEntry(
        "steward.bank.actions.status",
        "",
        "operator",
        "Show the state of ledger, gate and reconciliation.",
    ),
    "bank.transfer": IndexEntry(
        "steward.bank.actions.money",
        "bank transfer",
        "operator",
        "Transfer service units from one account to another.",
    ),
    "bank.usage": IndexEntry(
        "steward.bank.actions.reports",
        "bank usage",
        "everyone",
        "Sum up charges by user, account, partition, time or cluster.",
        "steward.cli.bank_reports",
    ),
    "bank.user_change": IndexEntry(
        "steward.bank.actions.accounts",
        "bank user change",
        "everyone",
        "Set the spending limit of a user in an account.",
    ),
    "bank.user_create": IndexEntry(
        "steward.bank.actions.accounts", "bank user create", "everyone", "Add a user to an account."
    ),
    "bank.user_show": IndexEntry(
        "steward.bank.actions.accounts",
        "bank user show",
        "everyone",
        "Show the users of accounts and their spending limits.",
    ),
    "bank.withdraw": IndexEntry(
        "steward.bank.actions.money",
        "bank withdraw",
        "operator",
        "Withdraw service units from an account.",
    ),
    "bank.would_reject": IndexEntry(
        "steward.bank.actions.rates",
        "bank would-reject",
        "operator",
        "List jobs that the gate would have rejected.",
    ),
    "credentials.close": IndexEntry(
        "steward.admin.credentials.actions", "", "administrator", "End a browser session."
    ),
    "credentials.login": IndexEntry(
        "steward.admin.credentials.actions",
        "login",
        "everyone",
        "Print a link that logs you in to the web pages.",
        "steward.cli.credentials",
    ),
    "credentials.me": IndexEntry(
        "steward.admin.credentials.actions",
        "",
        "everyone",
        "Show the caller: user, authentication and roles.",
    ),
    "credentials.open": IndexEntry(
        "steward.admin.credentials.actions",
        "",
        "administrator",
        "Open a browser session for a login link or for the user of a trusted proxy.",
    ),
    "credentials.peek": IndexEntry(
        "steward.admin.credentials.actions",
        "",
        "administrator",
        "Show the user of a login link; the link stays valid.",
    ),
    "credentials.settings": IndexEntry(
        "steward.admin.credentials.actions",
        "",
        "administrator",
        "Return the settings of the web process.",
    ),
    "credentials.ticket": IndexEntry(
        "steward.admin.credentials.actions",
        "",
        "administrator",
        "Verify the MUNGE credential of one request and return a ticket for it.",
    ),
    "credentials.token_create": IndexEntry(
        "steward.admin.credentials.actions",
        "token create",
        "everyone",
        "Create an API token for a program that acts as you.",
        "steward.cli.credentials",
    ),
    "credentials.token_list": IndexEntry(
        "steward.admin.credentials.actions", "token list", "everyone", "List your API tokens."
    ),
    "credentials.token_revoke": IndexEntry(
        "steward.admin.credentials.actions",
        "token revoke",
        "everyone",
        "Revoke API tokens or browser sessions.",
    ),
    "doctor.run": IndexEntry(
        "steward.admin.doctor.actions", "", "operator", "Run all health checks, or the named ones."
    ),
    "events.list": IndexEntry(
        "steward.reports.events", "", "everyone", "List events of the journal, newest last."
    ),
    "history.events": IndexEntry(
        "steward.reports.history.actions", "", "everyone", "List state events, newest first."
    ),
    "history.job_events": IndexEntry(
        "steward.reports.history.actions",
        "",
        "everyone",
        "List the state events of a job's nodes during its run.",
    ),
    "history.node": IndexEntry(
        "steward.reports.history.actions",
        "",
        "everyone",
        "Show the states of a node over an interval, and its down time.",
    ),
    "history.node_counts": IndexEntry(
        "steward.reports.history.actions", "", "everyone", "Count nodes by state."
    ),
    "history.node_jobs": IndexEntry(
        "steward.reports.history.actions",
        "",
        "everyone",
        "List the jobs that run or ran on a node and that the user may see.",
    ),
    "history.nodes": IndexEntry(
        "steward.reports.history.actions",
        "",
        "everyone",
        "List node states, now or at a past time.",
    ),
    "history.partitions": IndexEntry(
        "steward.reports.history.actions",
        "",
        "everyone",
        "List present partitions with their states.",
    ),
    "history.reservations": IndexEntry(
        "steward.reports.history.actions",
        "",
        "everyone",
        "List present reservations with their states.",
    ),
    "journal.dead": IndexEntry(
        "steward.admin.journal",
        "journal dead",
        "operator",
        "List dead letters: events that a consumer rejected, with the error.",
    ),
    "journal.forget": IndexEntry(
        "steward.admin.journal",
        "journal forget",
        "operator",
        "Remove a consumer permanently: the journal keeps no events for it.",
    ),
    "journal.list": IndexEntry(
        "steward.admin.journal",
        "journal list",
        "operator",
        "List events of the journal, newest last.",
    ),
    "journal.retry": IndexEntry(
        "steward.admin.journal", "journal retry", "operator", "Retry dead letters of a consumer."
    ),
    "journal.status": IndexEntry(
        "steward.admin.journal",
        "journal status",
        "operator",
        "Show the size of the journal, and state and lag of its consumers.",
        "steward.cli.journal",
    ),
    "reports.accounts": IndexEntry(
        "steward.reports.actions",
        "report accounts",
        "everyone",
        "Report usage by account and user.",
    ),
    "reports.cluster": IndexEntry(
        "steward.reports.actions",
        "report cluster",
        "everyone",
        "Report CPU and GPU utilization of clusters, as 'sreport cluster Utilization' does.",
    ),
    "reports.jobs": IndexEntry(
        "steward.reports.actions",
        "report jobs",
        "everyone",
        "Count jobs by account, size and state.",
    ),
    "reports.partitions": IndexEntry(
        "steward.reports.actions",
        "report partitions",
        "everyone",
        "Report usage of partitions, and the wait times of their jobs.",
    ),
    "reports.users": IndexEntry(
        "steward.reports.actions",
        "report users",
        "everyone",
        "Report usage by user, largest first.",
    ),
    "reports.waits": IndexEntry(
        "steward.reports.actions",
        "report waits",
        "everyone",
        "Report wait times of jobs, from eligible to start.",
    ),
    "reports.waste": IndexEntry(
        "steward.reports.actions",
        "report waste",
        "everyone",
        "Report allocated resources that ended jobs did not use.",
    ),
    "rules.check": IndexEntry(
        "steward.automation.rules.actions", "", "operator", "Check rule files and report errors."
    ),
    "rules.disable": IndexEntry(
        "steward.automation.rules.actions",
        "rules disable",
        "administrator",
        "Disable a rule, whatever its file says, and hold back its waiting executions.",
    ),
    "rules.enable": IndexEntry(
        "steward.automation.rules.actions",
        "rules enable",
        "administrator",
        "Enable a rule, whatever its file says.",
    ),
    "rules.history": IndexEntry(
        "steward.automation.rules.actions",
        "rules history",
        "operator",
        "List executions of rules, newest first.",
    ),
    "rules.list": IndexEntry(
        "steward.automation.rules.actions",
        "rules list",
        "operator",
        "List rules with their states and execution counts.",
    ),
    "rules.test": IndexEntry(
        "steward.automation.rules.actions",
        "",
        "operator",
        "Test an event against rules without running actions.",
    ),
    "status.metrics": IndexEntry(
        "steward.admin.status.metrics", "", "operator", "Show metrics in the format of Prometheus."
    ),
    "status.show": IndexEntry(
        "steward.admin.status.summary",
        "",
        "operator",
        "Show the status of Steward: processes, backlog, clusters, disks, the bank.",
    ),
}
