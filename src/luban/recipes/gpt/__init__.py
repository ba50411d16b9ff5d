"""The main job: a small GPT trained on real text."""
