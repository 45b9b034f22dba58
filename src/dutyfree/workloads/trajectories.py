def trajectory(n, fixture, url):
    raise NotImplementedError
