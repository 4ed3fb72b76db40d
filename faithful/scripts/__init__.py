"""For scripts that do not know this package: what other libraries ask of the machine, answered for a rehearsal."""
