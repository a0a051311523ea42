"""The main job, shown: conversations stream while two adapters are trained, and every figure is measured."""
