"""The Accelerator's save_state, load_state and save_model: who takes part (saving.py), what a run's state is
(state.py), whole weights of a model that no process holds (whole_weights.py). It may import training and checkpoint."""
