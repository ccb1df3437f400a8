"""One trace: the layers switched on, the step run, the layers switched off."""
