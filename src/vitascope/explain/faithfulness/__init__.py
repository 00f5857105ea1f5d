"""How faithful heatmaps are to the model: deletion, insertion and ROAD, over a random floor."""
