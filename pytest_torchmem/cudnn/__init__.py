"""cuDNN's own answers for a GPU that is not there; nothing here needs torch.

Since 9.8 cuDNN lists its execution plans, with their workspaces, for a description of a GPU
(«deviceless ahead-of-time compilation» in the documentation of cudnn-frontend). A process of its
own asks it (``execution_plans.py``), which ``library.py`` starts; it remembers the answers.
"""
