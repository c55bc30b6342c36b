"""Write rows of Spark as tasks, once however often Spark repeats a part."""
