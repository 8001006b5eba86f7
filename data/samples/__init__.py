"""Sample prompts written for this project, and the script that draws them."""
