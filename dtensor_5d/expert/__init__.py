"""The expert axis: where tokens go (`route`), how (`transport`, `dispatch`, `variants`), what experts do."""
