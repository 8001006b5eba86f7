# Makes these settings a package, `drafters.conf` in the wheel, where Hydra finds them without a checkout.
