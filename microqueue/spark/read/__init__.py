"""Read tasks into Spark: batches and streams, from raw BSON to Arrow."""
