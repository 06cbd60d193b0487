"""masterless in other tools: averages, transformers, export to servers. What they need is imported when it is used."""
