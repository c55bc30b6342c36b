"""Write rows as tasks, exactly once even if Spark retries."""
