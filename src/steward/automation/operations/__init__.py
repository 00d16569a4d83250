"""Operations: one module per subject (jobs, nodes, cluster, triggers, programs, mail, bank)."""
