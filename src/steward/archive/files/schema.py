"""The tables of a files sink's database, and how an older one becomes the present one.

What a holder's files take is kept as sums (see counting.py). An index that only
limits need is there only where there are limits: it costs every job some time.
"""

from typing import Final

MIGRATIONS: Final = (
    """
    CREATE TABLE cursor (position INTEGER NOT NULL);
    INSERT INTO cursor VALUES (0);
    CREATE TABLE marker (tree TEXT PRIMARY KEY, id TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE directory (number INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE);
    CREATE TABLE script (
        key TEXT NOT NULL,
        cluster TEXT NOT NULL,
        job_id INTEGER NOT NULL,
        mtime_ns INTEGER NOT NULL,
        state INTEGER NOT NULL,
        directory INTEGER NOT NULL,
        script_name TEXT NOT NULL,
        script_sha BLOB,
        script_length INTEGER NOT NULL,
        env_name TEXT NOT NULL,
        env_sha BLOB,
        env_length INTEGER NOT NULL,
        uid INTEGER,
        user TEXT NOT NULL,
        since_ns INTEGER NOT NULL,
        came_from TEXT NOT NULL,
        body BLOB,
        PRIMARY KEY (key, cluster)
    ) WITHOUT ROWID;
    CREATE INDEX script_age ON script (state, mtime_ns);
    CREATE INDEX script_directory ON script (directory);
    CREATE TABLE owner (
        scope TEXT NOT NULL,
        uid INTEGER NOT NULL,
        user TEXT NOT NULL,
        directory TEXT NOT NULL,
        shut INTEGER NOT NULL DEFAULT 0,
        shut_there INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (scope, uid, user),
        UNIQUE (scope, directory)
    ) WITHOUT ROWID;
    CREATE TABLE moving (
        key TEXT NOT NULL,
        cluster TEXT NOT NULL,
        row BLOB NOT NULL,
        PRIMARY KEY (key, cluster)
    ) WITHOUT ROWID;
    CREATE TABLE later (
        number INTEGER PRIMARY KEY,
        kind TEXT NOT NULL,
        key TEXT NOT NULL,
        cluster TEXT NOT NULL,
        body BLOB NOT NULL
    );
    """,
    """
    CREATE INDEX script_owner ON script (uid, user, directory) WHERE uid IS NOT NULL;
    CREATE TABLE admitting (
        moved INTEGER NOT NULL,
        uid INTEGER NOT NULL,
        user TEXT NOT NULL,
        shut INTEGER NOT NULL,
        directory INTEGER NOT NULL,
        key TEXT NOT NULL,
        cluster TEXT NOT NULL,
        PRIMARY KEY (moved, uid, user)
    ) WITHOUT ROWID;
    ALTER TABLE later ADD COLUMN tries INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE later ADD COLUMN due_s INTEGER NOT NULL DEFAULT 0;
    """,
    """
    CREATE TABLE holder (
        number INTEGER PRIMARY KEY,
        cluster TEXT NOT NULL,
        uid INTEGER NOT NULL,
        user TEXT NOT NULL,
        account TEXT NOT NULL,
        bytes INTEGER NOT NULL DEFAULT 0,
        UNIQUE (cluster, uid, user, account)
    );
    ALTER TABLE script ADD COLUMN holder INTEGER;
    ALTER TABLE script ADD COLUMN shared INTEGER NOT NULL DEFAULT 0;
    INSERT INTO holder (cluster, uid, user, account)
        SELECT DISTINCT cluster, uid, user, '' FROM script WHERE uid IS NOT NULL AND state >= 2;
    UPDATE script SET holder = (
        SELECT number FROM holder
        WHERE holder.cluster = script.cluster AND holder.uid = script.uid
            AND holder.user = script.user
    ) WHERE uid IS NOT NULL AND state >= 2;
    UPDATE holder SET bytes = (
        SELECT total(script_length) + total(env_length) FROM script
        WHERE script.holder = holder.number
    );

    -- number: see counting.py. job_id: of the last script that has it.
    CREATE TABLE content (
        number INTEGER PRIMARY KEY,
        holder INTEGER NOT NULL,
        uses INTEGER NOT NULL,
        length INTEGER NOT NULL,
        job_id INTEGER NOT NULL
    );
    CREATE TRIGGER content_in AFTER INSERT ON content BEGIN
        UPDATE holder SET bytes = bytes + NEW.length WHERE number = NEW.holder;
    END;
    CREATE TRIGGER content_out AFTER DELETE ON content BEGIN
        UPDATE holder SET bytes = bytes - OLD.length WHERE number = OLD.holder;
    END;

    -- What a limit has ordered to be purged, and is not gone yet.
    CREATE TABLE ordered (
        cluster TEXT NOT NULL,
        key TEXT NOT NULL,
        at_s INTEGER NOT NULL,
        PRIMARY KEY (cluster, key)
    ) WITHOUT ROWID;
    CREATE TRIGGER ordered_out AFTER DELETE ON script BEGIN
        DELETE FROM ordered WHERE cluster = OLD.cluster AND key = OLD.key;
    END;
    """,
    """
    DROP TRIGGER content_in;

    -- Files that were replaced, until they are removed. moved: as in admitting.
    CREATE TABLE leaving (
        moved INTEGER NOT NULL,
        directory TEXT NOT NULL,
        name TEXT NOT NULL,
        PRIMARY KEY (moved, directory, name)
    ) WITHOUT ROWID;
    """,
)

HOLDER_INDEX: Final = (
    "CREATE INDEX IF NOT EXISTS script_holder ON script (holder, mtime_ns) WHERE holder IS NOT NULL"
)
NO_HOLDER_INDEX: Final = "DROP INDEX IF EXISTS script_holder"
