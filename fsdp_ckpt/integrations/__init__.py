"""Other trainers' loops on checkpoints of this package; each module needs the library it is named for."""
