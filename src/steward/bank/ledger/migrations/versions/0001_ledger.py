"""Create the first schema of the ledger: tables, append-only triggers, the bank's own counterparts.

The SQL uses only types and clauses that SQLite and PostgreSQL have in common.

Revision ID: 0001
Revises:
"""

from typing import Final

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_FOR_EVER: Final = ("act", "entry", "charge_version", "rate", "settlement")

_TABLES: Final = (
    """
    CREATE TABLE account (
        name TEXT NOT NULL,
        parent TEXT NOT NULL,
        owners TEXT NOT NULL,
        credit_limit BIGINT NOT NULL,
        parent_pays BIGINT NOT NULL,
        only_listed BIGINT NOT NULL,
        closed BIGINT NOT NULL,
        note TEXT NOT NULL,
        known BIGINT NOT NULL,
        created_us BIGINT NOT NULL,
        seq BIGINT NOT NULL,
        PRIMARY KEY (name),
        CONSTRAINT credit_limit_is_not_negative CHECK (credit_limit >= 0)
    )
    """,
    """
    CREATE INDEX account_seq ON account (seq)
    """,
    """
    CREATE TABLE act (
        number BIGINT NOT NULL,
        at_us BIGINT NOT NULL,
        kind TEXT NOT NULL,
        posted_by TEXT NOT NULL,
        reason TEXT NOT NULL,
        client_key TEXT,
        asked TEXT NOT NULL,
        account TEXT NOT NULL,
        user_name TEXT NOT NULL,
        charge BIGINT,
        amount BIGINT NOT NULL,
        PRIMARY KEY (number),
        CONSTRAINT act_client_key UNIQUE (client_key)
    )
    """,
    """
    CREATE INDEX act_account ON act (account, at_us)
    """,
    """
    CREATE INDEX act_charge ON act (charge)
    """,
    """
    CREATE INDEX act_user ON act (user_name, at_us)
    """,
    """
    CREATE TABLE charge (
        number BIGINT NOT NULL,
        "key" TEXT NOT NULL,
        cluster TEXT NOT NULL,
        job_id BIGINT NOT NULL,
        first_submit_us BIGINT NOT NULL,
        account TEXT NOT NULL,
        user_name TEXT NOT NULL,
        partition_name TEXT NOT NULL,
        payer TEXT NOT NULL,
        amount BIGINT NOT NULL,
        refunded BIGINT NOT NULL,
        overdraw BIGINT NOT NULL,
        hold TEXT NOT NULL,
        begin_us BIGINT NOT NULL,
        first_at_us BIGINT NOT NULL,
        last_at_us BIGINT NOT NULL,
        versions BIGINT NOT NULL,
        body {blob} NOT NULL,
        PRIMARY KEY (number),
        CONSTRAINT charge_is_not_negative CHECK (amount >= 0 AND refunded >= 0),
        CONSTRAINT charge_key UNIQUE ("key")
    )
    """,
    """
    CREATE INDEX charge_account ON charge (account, begin_us)
    """,
    """
    CREATE INDEX charge_job ON charge (cluster, job_id)
    """,
    """
    CREATE INDEX charge_last ON charge (last_at_us, number)
    """,
    """
    CREATE INDEX charge_user ON charge (user_name, begin_us)
    """,
    """
    CREATE TABLE cursor (
        name TEXT NOT NULL,
        position BIGINT NOT NULL,
        PRIMARY KEY (name)
    )
    """,
    """
    CREATE TABLE lease (
        name TEXT NOT NULL,
        holder TEXT NOT NULL,
        fence BIGINT NOT NULL,
        until_us BIGINT NOT NULL,
        PRIMARY KEY (name)
    )
    """,
    """
    CREATE TABLE mark (
        name TEXT NOT NULL,
        said TEXT NOT NULL,
        PRIMARY KEY (name)
    )
    """,
    """
    CREATE TABLE mode (
        cluster TEXT NOT NULL,
        partition_name TEXT NOT NULL,
        account TEXT NOT NULL,
        mode TEXT NOT NULL,
        PRIMARY KEY (cluster, partition_name, account)
    )
    """,
    """
    CREATE TABLE outbox (
        id BIGINT NOT NULL,
        kind TEXT NOT NULL,
        item_key TEXT,
        payload {blob} NOT NULL,
        tries BIGINT NOT NULL,
        next_us BIGINT NOT NULL,
        error TEXT NOT NULL,
        done BIGINT NOT NULL,
        PRIMARY KEY (id),
        CONSTRAINT outbox_key UNIQUE (kind, item_key)
    )
    """,
    """
    CREATE INDEX outbox_due ON outbox (kind, done, next_us)
    """,
    """
    CREATE TABLE rate (
        number BIGINT NOT NULL,
        cluster TEXT NOT NULL,
        partition_name TEXT NOT NULL,
        qos TEXT NOT NULL,
        valid_from_us BIGINT NOT NULL,
        made_by BIGINT NOT NULL,
        body {blob} NOT NULL,
        PRIMARY KEY (number)
    )
    """,
    """
    CREATE TABLE rejection (
        id TEXT NOT NULL,
        at_us BIGINT NOT NULL,
        mode TEXT NOT NULL,
        cluster TEXT NOT NULL,
        uid BIGINT NOT NULL,
        user_name TEXT NOT NULL,
        account TEXT NOT NULL,
        partition_name TEXT NOT NULL,
        job_id BIGINT NOT NULL,
        amount BIGINT NOT NULL,
        reason TEXT NOT NULL,
        PRIMARY KEY (id)
    )
    """,
    """
    CREATE INDEX rejection_at ON rejection (at_us)
    """,
    """
    CREATE TABLE settlement (
        seq BIGINT NOT NULL,
        hold TEXT NOT NULL,
        charge TEXT NOT NULL,
        amount BIGINT NOT NULL,
        frees BIGINT NOT NULL,
        final BIGINT NOT NULL,
        PRIMARY KEY (seq)
    )
    """,
    """
    CREATE TABLE state (
        id BIGINT NOT NULL,
        seq BIGINT NOT NULL,
        rules_seq BIGINT NOT NULL,
        settlement BIGINT NOT NULL,
        PRIMARY KEY (id)
    )
    """,
    """
    CREATE TABLE threshold (
        allocation BIGINT NOT NULL,
        kind TEXT NOT NULL,
        value BIGINT NOT NULL,
        at_us BIGINT NOT NULL,
        PRIMARY KEY (allocation, kind, value)
    )
    """,
    """
    CREATE TABLE token (
        digest TEXT NOT NULL,
        user_name TEXT NOT NULL,
        created_us BIGINT NOT NULL,
        expires_us BIGINT,
        note TEXT NOT NULL,
        PRIMARY KEY (digest)
    )
    """,
    """
    CREATE TABLE told (
        jobslurmid TEXT NOT NULL,
        user_name TEXT NOT NULL,
        uid BIGINT NOT NULL,
        account TEXT NOT NULL,
        status TEXT NOT NULL,
        partition_name TEXT NOT NULL,
        amount BIGINT NOT NULL,
        submitted_us BIGINT,
        started_us BIGINT,
        ended_us BIGINT,
        body {blob} NOT NULL,
        PRIMARY KEY (jobslurmid)
    )
    """,
    """
    CREATE INDEX told_started ON told (started_us, jobslurmid)
    """,
    """
    CREATE TABLE charge_version (
        charge BIGINT NOT NULL,
        number BIGINT NOT NULL,
        at_us BIGINT NOT NULL,
        who TEXT NOT NULL,
        why TEXT NOT NULL,
        added BIGINT NOT NULL,
        acts TEXT NOT NULL,
        body {blob} NOT NULL,
        PRIMARY KEY (charge, number),
        FOREIGN KEY(charge) REFERENCES charge (number)
    )
    """,
    """
    CREATE TABLE member (
        account TEXT NOT NULL,
        name TEXT NOT NULL,
        limit_amount BIGINT,
        spent BIGINT NOT NULL,
        listed BIGINT NOT NULL,
        PRIMARY KEY (account, name),
        FOREIGN KEY(account) REFERENCES account (name)
    )
    """,
    """
    CREATE INDEX member_name ON member (name)
    """,
    """
    CREATE TABLE allocation (
        number BIGINT NOT NULL,
        account TEXT,
        begin_us BIGINT NOT NULL,
        end_us BIGINT,
        rollover TEXT NOT NULL,
        note TEXT NOT NULL,
        balance BIGINT NOT NULL,
        granted BIGINT NOT NULL,
        made_by BIGINT NOT NULL,
        PRIMARY KEY (number),
        CONSTRAINT not_below_zero CHECK (number < 0 OR end_us IS NULL OR balance >= 0),
        CONSTRAINT begins_before_it_ends CHECK (end_us IS NULL OR begin_us < end_us),
        CONSTRAINT has_an_account CHECK ((number < 0) = (account IS NULL)),
        FOREIGN KEY(account) REFERENCES account (name)
    )
    """,
    """
    CREATE INDEX allocation_account ON allocation (account)
    """,
    """
    CREATE INDEX allocation_end ON allocation (end_us)
    """,
    """
    CREATE INDEX allocation_made_by ON allocation (made_by)
    """,
    """
    CREATE TABLE entry (
        act BIGINT NOT NULL,
        allocation BIGINT NOT NULL,
        amount BIGINT NOT NULL,
        balance BIGINT NOT NULL,
        PRIMARY KEY (act, allocation),
        CONSTRAINT moves_something CHECK (amount <> 0),
        FOREIGN KEY(act) REFERENCES act (number),
        FOREIGN KEY(allocation) REFERENCES allocation (number)
    )
    """,
    """
    CREATE INDEX entry_allocation ON entry (allocation, act)
    """,
)

_SQLITE: Final = """
    CREATE TRIGGER {table}_never_{verb} BEFORE {verb} ON {table}
    BEGIN SELECT RAISE(ABORT, '{table}: entered for ever, never changed'); END
"""

_FUNCTION: Final = """
    CREATE FUNCTION steward_for_ever() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION '%: entered for ever, never changed', TG_TABLE_NAME; END $$
"""

_POSTGRESQL: Final = """
    CREATE TRIGGER {table}_never_changed BEFORE UPDATE OR DELETE OR TRUNCATE ON {table}
    FOR EACH STATEMENT EXECUTE FUNCTION steward_for_ever()
"""

_POT: Final = """
    INSERT INTO allocation (number, begin_us, rollover, note, balance, granted, made_by)
    VALUES ({number}, 0, 'none', '', 0, 0, 0)
"""


def upgrade() -> None:
    """Create the tables, the triggers of append-only tables, and the bank's own counterparts."""
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    for table in _TABLES:
        op.execute(table.format(blob="BLOB" if is_sqlite else "BYTEA"))
    if not is_sqlite:
        op.execute(_FUNCTION)
    for table in _FOR_EVER:
        if is_sqlite:
            for verb in ("UPDATE", "DELETE"):
                op.execute(_SQLITE.format(table=table, verb=verb))
        else:
            op.execute(_POSTGRESQL.format(table=table))
    op.execute("INSERT INTO state (id, seq, rules_seq, settlement) VALUES (1, 0, 0, 0)")
    for number in (-1, -2, -3, -4):
        op.execute(_POT.format(number=number))


def downgrade() -> None:
    """Refuse to remove the ledger.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError("a ledger cannot be downgraded: restore a backup instead")
