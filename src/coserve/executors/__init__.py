"""The seam between the host and a device: the protocol (`executor`), its codec, transports to a worker
(`local`, in this process; `remote`, in another), several bases as one (`composed`), and `scripted`, which has
no model and checks every plan, for tests."""
