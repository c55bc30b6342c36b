"""Read tasks into Spark, as batches and as streams."""
