"""What a trace found: the timeline, the figures and the tables read from it."""
