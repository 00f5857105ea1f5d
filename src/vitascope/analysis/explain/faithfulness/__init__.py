"""The faithfulness of heatmaps to the model: deletion, insertion and ROAD, over a random baseline."""
